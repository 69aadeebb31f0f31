#!/bin/sh
# Prints the first cargo that runs, of PATH and then /usr/bin; nothing where there is none. The
# cargo of a rustup without a default toolchain is found and does not run.
set -f
IFS=:
for folder in $PATH /usr/bin; do
  cargo="${folder:-.}/cargo"
  if [ -f "$cargo" ] && [ -x "$cargo" ] && "$cargo" --version >/dev/null 2>&1; then
    printf '%s\n' "$cargo"
    exit 0
  fi
done
