"""Runs `dflash verify` on a target with a drafter made from its own layers: `verify_target.py TARGET`."""

import sys
import tempfile
from pathlib import Path

import torch

from dflash.cli import main
from dflash.config import DraftConfig
from dflash.export import write_draft
from dflash.initialize import initialize
from dflash.target import load_target

# As the demo's: of use at once, so that some of its guesses are accepted.
DRAFT = DraftConfig(num_layers=1, block_size=8, target_layer_ids=(13,), mask_token_id=16, init="target")

if __name__ == "__main__":
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        write_draft(initialize(DRAFT, load_target(target, torch.float32), seed=0), Path(folder), torch.float32)
        sys.argv[1:] = ["verify", folder, str(target)]
        main()
