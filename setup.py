"""Builds the CPU kernels; everything else about the package is in pyproject.toml.

The kernels are a plain shared library that ctypes loads, so they do not depend on Python's version. They are
optional: without a compiler the package installs all the same, and torch operations take their place.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "zeroshard.native._kernels",
            sources=["src/zeroshard/native/kernels.c"],
            # No contraction to fused multiply-add, which would round otherwise than torch does; no
            # -march=native: the source picks its vector width at run time, so a library built here runs on
            # another machine.
            extra_compile_args=["-O3", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
            extra_link_args=["-pthread"],
            optional=True,
        )
    ]
)
