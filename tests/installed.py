"""Try a wheel as its users do: ``python tests/installed.py WHEEL`` installs it into an empty environment, and runs it.

Nothing of the checkout is in reach there: what the wheel forgot to pack is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(257, 32)
        self.head = torch.nn.Linear(32, 257)
    def forward(self, batch):
        return self.head(self.token(batch))
"""
RUN = """
[model]
source = "net:Net"
[data]
source = "text.txt"
seq_len = 32
[run]
nproc = 2
steps = 4
batch_size = 4
"""


def main(wheel: Path) -> None:
    """Install the wheel, and run the ways in that need no data, models or devices."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        venv.create(place / "env", with_pip=True)
        (place / "net.py").write_text(MODEL)
        (place / "run.toml").write_text(RUN)
        (place / "text.txt").write_text("All that a model reads here is this sentence. " * 400)

        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

        def run(program: str, *arguments: str) -> None:
            print("$", program, *arguments, flush=True)
            command = [str(place / "env" / "bin" / program), *arguments]
            subprocess.run(command, cwd=place, env=environment, check=True)

        # With torch as it is pinned: another build of it would be gigabytes.
        run("pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", str(CONSTRAINTS), str(wheel))
        run("meshwright", "--version")
        run("meshwright", "plan", "--model", "llama-3-8b", "--cluster", "h100x64", "--global-batch", "256")
        run("meshwright", "train", "run.toml", "--out", "runs/one")
        run("python", "-c", "import meshwright as mw; print(mw.plan('gpt2', 'a100-80x8', global_batch=64)[0].strategy)")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
