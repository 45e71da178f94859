"""ZeroShard inside of other libraries. Each module imports the library that it is named after."""
