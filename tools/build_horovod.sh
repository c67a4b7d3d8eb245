#!/usr/bin/env bash
# Builds Horovod 0.28.1 (2023, its last release) against the torch of .venv-systems and installs it there: minutes, with a C++20
# compiler and CMake. As published it does not build with a torch of today; docs/systems.md says what is changed and why.
# PYTHON names another interpreter with torch, JOBS the number of compilers at a time.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv-systems/bin/python}
version=0.28.1
"$python" -c 'import torch' || { echo "no torch in $python: run \`make systems\` first, or name another PYTHON" >&2; exit 1; }

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
source=$work/horovod-$version
pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }
pip download --no-deps --no-binary=:all: --no-build-isolation --dest "$work" "horovod==$version"
tar -xzf "$source.tar.gz" -C "$work"

# Today's headers of torch are C++20.
sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 20)/' "$source"/{,horovod/torch/}CMakeLists.txt
# A torch that could use CUDA, or an nvcc on the path, must not make this a CUDA build.
sed -i -e 's/^ *check_language(CUDA)//' -e 's/^if(NOT CMAKE_CUDA_COMPILER)/if(FALSE)/' "$source/CMakeLists.txt"
sed -i 's/(CUDA_HOME is not None)/False/' "$source/cmake/Modules/FindPytorch.cmake"
# Without debug information: minutes faster to compile, and 62 MB smaller.
sed -i "s/'RelWithDebInfo'/'Release'/" "$source/setup.py"

export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1
export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
export CMAKE_POLICY_VERSION_MINIMUM=3.5 # what it brings along asks for versions that CMake 4 refuses
export MAKEFLAGS=-j${JOBS:-$(nproc)}
pip wheel --no-deps --no-build-isolation --wheel-dir "$work" "$source"
pip install --force-reinstall --no-deps "$work/horovod-$version"-*.whl
pip install -c constraints.txt "horovod==$version" # what it needs, if anything is missing
"$python" -c "import horovod.torch as hvd; hvd.init(); print('horovod $version with Gloo:', hvd.gloo_built())"
