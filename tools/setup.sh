#!/bin/sh
# Makes .venv, or mends it, and installs everstep with one of its extras: sh tools/setup.sh demo|test
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
.venv/bin/python -m pip install -qq --disable-pip-version-check -e ".[$1]" -c constraints.txt
[ "$1" != test ] || { sh tools/browser.sh; sh tools/strace.sh; }
