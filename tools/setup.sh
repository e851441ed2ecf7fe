#!/bin/sh
# Makes .venv, or mends it, and installs everstep with one of its extras: sh tools/setup.sh demo|test|campaign
# All of it is locked: versions and hashes stand in requirements/, which "make lock" makes.
# Or makes .venv/NAME with packages that stay beside the project: sh tools/setup.sh --beside NAME PACKAGE...
set -eu
recent='import sys; sys.exit(sys.version_info < (3, 11))'

if [ -n "${PYTHON:-}" ]; then candidates=$PYTHON; else
  candidates='python3 python3.13 python3.12 python3.11 python3.14 python'
fi
found=
for name in $candidates; do
  if command -v "$name" >/dev/null 2>&1 && "$name" -c "$recent" 2>/dev/null; then found=$name; break; fi
done
if [ -z "$found" ]; then
  echo "everstep needs Python 3.11 or newer; looked for: $candidates." >&2
  echo "Install one, or name it: make demo PYTHON=/path/to/python3.12" >&2
  exit 2
fi

if [ "$1" = --beside ]; then
  place=.venv/$2
  shift 2
  "$found" -m venv "$place"
  exec "$place/bin/python" -m pip install -qq --disable-pip-version-check "$@"
fi

echo "Setting up .venv for make $1, once: this installs PyTorch, which takes a minute or more ..."
"$found" -m venv .venv || {
  echo "No virtual environment could be made with $found; on Debian: apt install python3-venv" >&2
  exit 2
}
pip=".venv/bin/python -m pip --disable-pip-version-check"

here=$("$found" -c 'import platform, sys
print(sys.implementation.cache_tag + sys.abiflags, platform.system(), platform.machine(), sep="-")')
if ! grep -qx "# $here" "requirements/$1.txt"; then
  echo "The lock in requirements/ is not for $here; pip takes the newest versions that pyproject.toml allows."
  $pip install -qq -e ".[$1]" -c constraints.txt
else
  locked="--no-deps --require-hashes --only-binary :all:"
  # uv is five times as fast as pip, but does not know pip's settings: pip installs torch, of which there are several
  # builds, and whatever uv cannot fetch.
  uv=$(command -v uv) || uv=.venv/bin/uv
  [ -x "$uv" ] || $pip install -qq $locked -r requirements/uv.txt || uv=false
  install() {
    "$uv" pip install -q --python .venv/bin/python "$@" || {
      echo "uv failed; pip tries the same ..." >&2
      $pip install -qq --no-compile "$@"
    }
  }
  { # a build without CUDA, where pip's settings lead to one
    $pip install -qq --no-compile $locked -r requirements/torch-cpu.txt 2>/dev/null ||
      $pip install -qq --no-compile $locked -r requirements/torch.txt
  } &
  torch=$!
  failed=
  install $locked -r "requirements/$1.txt" || failed=1
  wait $torch || failed=1
  [ -z "$failed" ] || exit 1
  if grep -qs "^Requires-Dist: cuda-" .venv/lib/python*/site-packages/torch-*.dist-info/METADATA; then
    install $locked -r requirements/cuda.txt
  fi
  install --no-deps --no-build-isolation -e .
fi
[ "$1" != campaign ] || { sh tools/browser.sh; sh tools/strace.sh; }
