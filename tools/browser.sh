#!/bin/sh
# Installs Chromium for the tests of the page, where none is found and Debian's packages may be installed.
# EVERSTEP_CHROMIUM=/path/to/chromium names another one, as it does for the tests.
set -eu
for name in "${EVERSTEP_CHROMIUM:-}" chromium chromium-browser google-chrome; do
  if [ -n "$name" ] && command -v "$name" >/dev/null 2>&1; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
  echo "Installing Chromium for the tests of the page, once ..."
  export DEBIAN_FRONTEND=noninteractive
  install="apt-get install -qq -y --no-install-recommends chromium"
  $install >/dev/null 2>&1 && exit 0
  # without a list of packages, or with an old one
  apt-get update -qq >/dev/null && $install >/dev/null && exit 0
fi
echo "The tests of the page need Chromium: apt-get install chromium as root, or EVERSTEP_CHROMIUM=/path/to/chromium." >&2
