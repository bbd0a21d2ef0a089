#!/usr/bin/env bash
# Runs the Containerfile's RUN lines, except apt-get, in a folder instead of a container: deploy/rehearse.sh FOLDER
# Needs a C++ compiler. FOLDER/topw/bin/topw is then the command that the image would have.
set -euo pipefail
folder="$(realpath -m "$1")"
root="$(cd "$(dirname "$0")/.." && pwd)"
mkdir -p "$folder/src"
cd "$root"
cp -r pyproject.toml setup.py MANIFEST.in README.md LICENSE constraints.txt src "$folder/src"
find "$folder/src" -name '*.so' -delete
cd "$folder/src"
export EXTRA="${EXTRA:-cpu}"
grep '^RUN ' "$root/deploy/Containerfile" | sed 's/^RUN //' | grep -v '^apt-get' | while IFS= read -r line; do
  line="${line//\/opt\/topw/$folder/topw}"
  echo "+ $line"
  bash -euo pipefail -c "$line"
done
du -sh "$folder/topw"
