"""fairseq's test suite: what of it is about optimizers over ranks."""

from __future__ import annotations

from .suite import Case, Change, Suite

_OURS = (
    'optim.FairseqBMUF = type("FairseqBMUF", '
    '(__import__("meshwright.fairseq").fairseq.FairseqBMUF, optim.FairseqOptimizer), {})'
)

SUITE = Suite(
    name="fairseq",
    title="fairseq",
    repository="facebookresearch/fairseq",
    files=("tests/test_*.py", "tests/*/test_*.py"),
    # fairseq stays: BMUF alone is replaced. Its dataclasses are those of Python 3.10, of which 3.11 refuses defaults.
    imports=(
        Change(r"^@dataclass$", "@dataclass(unsafe_hash=True)", "fairseq's dataclasses made fit for Python 3.11"),
    ),
    cases=(
        Case("tests/*", because="tests fairseq's data, tasks, models, generation or tools, which stay in fairseq"),
        Case("tests/gpu/*", because="starts fairseq's own programs on GPUs"),
        Case("tests/speech*", because="tests fairseq's models of speech, which are not here"),
        Case("tests/tasks/*", because="tests fairseq's tasks, which are not here"),
        Case(
            "tests/test_*fp16*.py",
            because="tests FP16Optimizer; half and amp_native keep masters and loss scales here",
        ),
        Case("tests/test_amp_optimizer.py", because="tests AMPOptimizer; amp_native scales losses here"),
        Case("tests/test_ema.py", because="tests fairseq's EMA module; the method ema averages weights here"),
        Case(
            "tests/test_activation_checkpointing.py",
            because="tests fairseq's checkpoint_wrapper; the method checkpoint recomputes here",
        ),
        Case(
            "tests/test_train.py",
            because="tests what fairseq's checkpoint_utils loads into a fake trainer, which stays in fairseq",
        ),
        Case(
            "tests/distributed/*",
            because="tests fairseq's wrappers and helpers of process groups, which stay in fairseq",
        ),
        Case(
            "tests/distributed/test_bmuf.py",
            sizes=(  # the change of import: without it, the file would test fairseq's own class
                Change(
                    r"^from fairseq import optim$",
                    f"from fairseq import optim\n{_OURS}",
                    "optim.FairseqBMUF is meshwright.fairseq.FairseqBMUF",
                ),
            ),
            changes=(
                Change(
                    r"^    cfg\.common = OmegaConf\.create\(\)$",
                    '    cfg.common = OmegaConf.create({"tpu": False})',
                    "a key that the test leaves out, which omegaconf above 2.0 does not take for None",
                ),
            ),
            ranks=(0,),
            run="-m pytest -q {file}",
            timeout_s=480,
        ),
    ),
)
