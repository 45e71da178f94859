"""A Keras script trained by all ranks: handwritten digits, a few dense layers, `compile`, `fit`, `evaluate`.

zeroshard run --ranks 8 examples/keras_digits.py

That tries 4 nodes of 2 ranks on one machine. With --nodes 1 --each 2, `python examples/keras_digits.py`
starts its two ranks itself; with --nodes 1 --each 1 it is one process, and comes to the same numbers.
"""

import argparse

import zeroshard.integrations.keras as tz

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--nodes", type=int, default=4, help="number of nodes (default 4)")
parser.add_argument("--each", type=int, default=2, help="ranks of a node, one for each GPU (default 2)")
parser.add_argument("--epochs", type=int, default=10, help="passes over the data (default 10)")
asked = parser.parse_args()

config = tz.Config()
config.num_nodes = asked.nodes
config.num_gpus_per_node = asked.each
config.memory_limit_per_node = 10 * 1024 * 1024 * 1024
tz.initialize(config)

import keras  # noqa: E402 - after the backend has been chosen
from sklearn.datasets import load_digits  # noqa: E402

keras.utils.set_random_seed(1)
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
x_train, y_train, x_test, y_test = images[:1500], labels[:1500], images[1500:], labels[1500:]

model = keras.Sequential(
    [
        keras.Input((64,)),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(256, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x_train, y_train, epochs=asked.epochs, validation_data=(x_test, y_test), verbose=2)
test_loss, test_accuracy = model.evaluate(x_test, y_test, verbose=2)
print(f"loss {test_loss:.6f}, accuracy {test_accuracy:.4f}")
