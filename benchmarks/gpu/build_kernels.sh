#!/usr/bin/env bash
# Build the host kernels in place, for a machine where the package is run from its sources.
set -e
cd "$(dirname "$0")/../.."
suffix=$(python3 -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
include=$(python3 -c "import sysconfig; print(sysconfig.get_paths()['include'])")
gcc -O3 -ffp-contract=off -fno-math-errno -pthread -shared -fPIC -I"$include" src/zeroshard/native/kernels.c -o "src/zeroshard/native/_kernels$suffix" -lm
