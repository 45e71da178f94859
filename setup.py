"""Builds the CPU kernels; everything else about the package is in pyproject.toml.

The kernels are a plain shared library that ctypes loads, so they do not depend on Python's version: a wheel
is for one platform and every Python that the package is for. They are optional: without a compiler the
package installs all the same, and torch operations take their place.
"""

import glob
import os
import platform
import sys

from setuptools import Extension, setup

# The library needs nothing of the system but the C library: the wheel is for its version here and later ones.
glibc = platform.libc_ver()
linux = f"manylinux_{glibc[1].replace('.', '_')}_{platform.machine()}" if glibc[0] == "glibc" else None
tags = {"py_limited_api": "cp311"} | ({"plat_name": linux} if sys.platform == "linux" and linux else {})

setup(
    ext_modules=[
        Extension(
            "zeroshard.kernels._kernels",
            # Every file of `updates` is an optimizer that the host knows.
            sources=[
                "src/zeroshard/kernels/kernels.c",
                *sorted(glob.glob("src/zeroshard/kernels/updates/*.c")),
            ],
            depends=sorted(glob.glob("src/zeroshard/kernels/**/*.h", recursive=True)),
            # No contraction to fused multiply-add, which would round otherwise than torch does; no
            # -march=native: the source picks its vector width at run time, so a library built here runs on
            # another machine.
            extra_compile_args=["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-pthread"],
            extra_link_args=["-pthread"],
            py_limited_api=True,
            # What is released has them; see `build` in `do`.
            optional="ZEROSHARD_KERNELS_REQUIRED" not in os.environ,
        )
    ],
    options={"bdist_wheel": tags},
)
