"""BMTrain's test suite and its example programs."""

from __future__ import annotations

from .suite import Case, Change, Suite

_SEVERAL = (2, 4)

# Sizes of a GPU with 80 GB; a CPU gets smaller ones, and the same statements.
_HIDDEN = Change(r"dim=4096, batch=32, seq_len=256", "dim=64, batch=4, seq_len=16", "small sizes")
_GPT = (
    Change(r"\b10240\b", "256", "small sizes"),
    Change(r"\b2560\b", "32", "small sizes"),
    Change(r"(dim_head\"?\s*[=:]\s*)80\b", r"\g<1>8", "small sizes"),
    Change(r"(num_heads\"?\s*[=:]\s*)32\b", r"\g<1>4", "small sizes"),
    Change(r"(num_layers\"?\s*[=:]\s*)8\b", r"\g<1>2", "small sizes"),
    Change(r"\b8192\b", "64", "small sizes"),
    Change(r"seq_len = 512", "seq_len = 16", "small sizes"),
    Change(r"randint\(128, seq_len", "randint(4, seq_len", "small sizes"),
    Change(r"for iter in range\(100\)", "for iter in range(12)", "small sizes"),
    Change(r"for iteration in range\(1000\)", "for iteration in range(12)", "small sizes"),
)

_FULL = "`full_tensor()` for the values of a parameter: it is a DTensor"
_MEAN = "gradients are those of the mean of all ranks' losses"

_GRADIENTS = (
    Change(r"weight_grad1\.reshape\(weight_grad_list\[tp_rank\]\.shape\)", "weight_grad1", _FULL),
    Change(r"bias_grad1\.reshape\(bias_grad_list\[tp_rank\]\.shape\)", "bias_grad1", _FULL),
)
_COLUMN = (
    *_GRADIENTS,
    Change(
        r"linear\._parameters\['(weight|bias)'\]\.grad",
        r"linear._parameters['\1'].grad.full_tensor().chunk(tp_size)[config['tp_rank']]"
        r" * (1 if gather_output else tp_size)",
        _MEAN,
    ),
    Change(
        r"rank_x\.grad\.cpu\(\)\.numpy\(\), x_grad_list",
        "rank_x.grad.cpu().numpy() / (tp_size if gather_output else 1), x_grad_list",
        "an activation's gradient is that of the sum of its tensor group's losses",
    ),
    Change(
        r"rank_x\.grad\.cpu\(\)\.numpy\(\), x\.grad",
        "bmt.distributed.all_reduce(rank_x.grad, 'avg', config['tp_comm']).cpu().numpy(), x.grad",
        "an activation's gradient is that of the sum of its tensor group's losses",
    ),
)
_ROW = (
    *_GRADIENTS,
    Change(
        r"linear\._parameters\['weight'\]\.grad",
        "linear._parameters['weight'].grad.full_tensor().chunk(config['tp_size'], 1)[config['tp_rank']]",
        _FULL,
    ),
    Change(r"linear\._parameters\['bias'\]\.grad", "linear._parameters['bias'].grad.full_tensor()", _FULL),
)

_CLIP = Change(
    r"clip_grad_norm\(optim_manager\.loss_scale, (optimizer\.param_groups, max_norm=10\.0)(, is_torch = True)?\)",
    r"optim_manager.clip_grad_norm(\1)",
    "OptimManager.clip_grad_norm for one of its own over NCCL",
)

SUITE = Suite(
    name="bmtrain",
    title="BMTrain",
    repository="OpenBMB/BMTrain",
    files=("tests/test_*.py", "example/train.py", "example/benchmark.py"),
    imports=(
        Change(r"^import bmtrain as bmt$", "import meshwright as bmt", "the import"),
        Change(r"\bfrom bmtrain\b", "from meshwright", "the import"),
        Change(r"\bimport bmtrain\.", "import meshwright.", "the import"),
    ),
    cases=(
        Case("tests/test_all.py", because="starts the other files, by name and number of GPUs"),
        Case("tests/test_has_inf_nan.py", because="tests a CUDA kernel of BMTrain's; OptimManager looks by torch's"),
        Case(
            "tests/test_parallel_projection.py",
            because="tests nn.Projection and nn.VPProjection, which BMTrain 1.0 lacks",
        ),
        Case(
            "tests/test_different_output_shape.py",
            changes=(
                Change(r"tuple\) and len\(y\)==10", "list) and len(y)==10", "a Block returns what its module does"),
            ),
        ),
        Case(
            "tests/test_store.py",
            changes=(
                Change(r"allgather_object$", "allgather_objects", "the name that BMTrain has today"),
                Change(
                    r"= allgather_object\(bmt\.rank\(\), .*\)",
                    "= allgather_objects(bmt.rank())",
                    "the name that BMTrain has today",
                ),
            ),
        ),
        Case(
            "tests/test_synchronize.py",
            ranks=(4,),
            changes=(
                Change(r"import nccl, distributed", "import distributed", "an import that nothing uses"),
                Change(
                    r"from meshwright\.synchronize import", "from meshwright import", "gather_result from the package"
                ),
            ),
        ),
        Case(
            "tests/test_grad_accu.py",
            changes=(
                Change(r"CheckpointBlockContext, +", "", "a name that BMTrain has no longer"),
                Change(r"\.grad(\.clone\(\))?$", r".grad.full_tensor()\1", _FULL),
            ),
        ),
        Case(
            "tests/test_no_grad.py",
            changes=(
                Change(r"except AssertionError", "except bmt.ModelError", "errors are Meshwright's"),
                Change(
                    r"(PipelineTransformerBlockList\(\[layer\]\)\s+)raise ValueError.*",
                    r"\1return",
                    "any Block may go into a pipeline",
                ),
            ),
        ),
        Case(
            "tests/test_init_parameters.py",
            changes=(
                Change(
                    r"ret\[i\]\[([01])\]\.view\(-1\)",
                    r"getattr(ret[i][\1], 'full_tensor', lambda: ret[i][\1])().view(-1)",
                    _FULL,
                ),
            ),
        ),
        Case("tests/test_init_parameters_multi_gpu.py", ranks=_SEVERAL),
        Case(
            "tests/test_load_ckpt.py",
            changes=(Change(r"(m[234]\.state_dict\(\)\[\w+\])\.cuda\(\)", r"\1.full_tensor()", _FULL),),
        ),
        Case(
            "tests/test_optim.py",
            changes=(
                Change(
                    r"torch\.optim\.Adam\(model3\.parameters\(\), lr=1\)",
                    "torch.optim.Adam(model3.parameters(), lr=1, fused=True)",
                    "torch's own fused Adam for comparison to the bit",
                ),
            ),
        ),
        Case(
            "tests/test_optim_state.py",
            changes=(
                Change(r"\(rp==p\)\.all\(\)", "(rp==p).full_tensor().all()", _FULL),
                Change(
                    r"deepcopy\(\[list\(.*\)\]\)",
                    "[[p.detach().clone() for p in m.parameters()] for m in (model1, model2, model3)]",
                    "`p.detach().clone()` for `deepcopy(p)` where p has a gradient",
                ),
            ),
        ),
        Case("tests/test_loss_func.py", ranks=(1,), sizes=(Change(r"range\(1, 31\)", "range(1, 2)", "small sizes"),)),
        Case("tests/test_model_wrapper.py", sizes=_GPT),
        Case("tests/test_training.py", sizes=_GPT, changes=(_CLIP,)),
        Case("tests/test_inspector_hidden.py", ranks=_SEVERAL, sizes=(_HIDDEN,)),
        Case("tests/test_middle_hidden.py", sizes=(_HIDDEN,)),
        Case("tests/test_other_hidden.py", sizes=(_HIDDEN,)),
        Case("tests/test_send_recv.py", ranks=_SEVERAL),
        Case("tests/test_column_parallel_linear.py", ranks=_SEVERAL, changes=_COLUMN),
        Case("tests/test_row_parallel_linear.py", ranks=_SEVERAL, changes=_ROW),
        Case("example/benchmark.py", ranks=_SEVERAL, project=True),
        Case("example/train.py", ranks=_SEVERAL, project=True, sizes=_GPT),
    ),
    python_path=("tests", "example"),
)
