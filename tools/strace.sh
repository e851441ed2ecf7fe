#!/bin/sh
# Installs strace for the tests of crash points and power cuts, where none is found and Debian's packages may be
# installed.  On macOS there is none: those tests need Linux.
set -eu
if command -v strace >/dev/null 2>&1; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "Installing strace for the tests of crash points, once ..."
  export DEBIAN_FRONTEND=noninteractive
  install="apt-get install -qq -y --no-install-recommends strace"
  $install >/dev/null 2>&1 && exit 0
  # without a list of packages, or with an old one
  apt-get update -qq >/dev/null && $install >/dev/null && exit 0
fi
echo "The tests of crash points and power cuts need strace: apt-get install strace as root." >&2
