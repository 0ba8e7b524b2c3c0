"""ATorch's test suite, and the example of ``auto_accelerate`` that comes with it."""

from __future__ import annotations

from .suite import Case, Change, Suite

_TESTS = "atorch/tests/"
_ON_CPU = (
    Change(r'f"cuda:\{rank\}"', '"cpu"', "workers that a test starts itself see the CPU"),
    Change(r'"nccl"', '"gloo"', "workers that a test starts itself see the CPU"),
)


def _without(reason: str, *names: str) -> tuple[Case, ...]:
    return tuple(Case(f"{_TESTS}{name}", because=reason) for name in names)


SUITE = Suite(
    name="atorch",
    title="ATorch",
    repository="intelligent-machine-learning/atorch",
    files=(f"{_TESTS}*_test.py", f"{_TESTS}*/test_*.py", "examples/auto_accelerate/train.py",
           "examples/nanoGPTATorch/train_atorch.py"),
    imports=(
        Change(r"^import atorch$", "import meshwright.atorch as atorch", "the import"),
        Change(
            r"^( *)from atorch\.(auto\.accelerate|auto|common\.util_func|distributed\.distributed|distributed) import",
            r"\1from meshwright.atorch.\2 import",
            "the import",
        ),
    ),
    losses=r"loss:? ([-+0-9.e]+)",
    python_path=(".", f"{_TESTS}common_tests/fsdp2", "examples/nanoGPTATorch"),
    cases=(
        Case(f"{_TESTS}*", because="tests modules of ATorch that are not offered here"),
        *_without(
            "tests the search engine's own parts (tasks, gRPC, planner, analyser, Bayesian optimisation); the planner"
            " here is another",
            "common_tests/acc_*_test.py", "common_tests/analyser_test.py", "common_tests/analyzer_result_test.py",
            "common_tests/auto_acc_*_test.py", "common_tests/auto_accelerate_context_test.py",
            "common_tests/bo_sg_test.py", "common_tests/device_context_test.py", "common_tests/dryrunner_test.py",
            "common_tests/engine_client_test.py", "common_tests/hebo_test.py", "common_tests/model_context_test.py",
            "common_tests/optimizations_test.py", "common_tests/tune_test.py",
        ),
        *_without(
            "replaces the engine behind auto_accelerate by a fake of its own parts; strategies in files, a model alone,"
            " a sample batch and sizes that follow the ranks are tested in tests/compat/test_atorch.py and"
            " tests/training",
            "common_tests/auto_accelerate_test.py",
        ),
        *_without(
            "looks into the context's private table, and starts coworkers and ATorch's launcher; the groups that it"
            " expects are tested in tests/compat/test_atorch.py",
            "common_tests/distributed_test.py",
        ),
        *_without(
            "asserts the classes of wrappers (FSDP1, fairscale, BF16Optimizer, ATorch's checkpoint); the strategies"
            " train in tests/compat/test_atorch.py",
            "common_tests/amp_test.py", "common_tests/bf16_optimizer_test.py", "common_tests/semi_auto_acc_test.py",
            "common_tests/zero_optimization_test.py", "common_tests/selective_checkpoint_test.py",
            "common_tests/module_replace_optimization_test.py", "common_tests/inspector_test.py",
            "common_tests/precision_switch_linear_test.py", "common_tests/scaled_linear_test.py",
            "common_tests/fsdp2/fsdp2_test.py", "common_tests/fsdp2/grad_norm_test.py",
        ),
        *_without(
            "saves and loads by ATorch's patches of FSDP1; CheckpointStore does it here",
            "common_tests/fsdp_*_test.py", "common_tests/hsdp_*_test.py", "common_tests/meta_*_test.py",
        ),
        *_without(
            "tests ATorch's tracer, compilers, layers and pipeline modules; tensor and pipeline parallelism here take"
            " the model as it is",
            "common_tests/pipe*_test.py", "common_tests/pipelining/*", "common_tests/mixed_parallel_test.py",
            "common_tests/tensor_parallel_*_test.py", "common_tests/tp_*_test.py", "common_tests/tracer_test.py",
            "common_tests/distributed_mappings_test.py", "common_tests/distributed_transformer_test.py",
            "common_tests/ds_*_test.py", "common_tests/manual_tp_test.py", "common_tests/megatron_vocab_test.py",
            "common_tests/randomizer_test.py", "common_tests/communicator_test.py",
        ),
        *_without(
            "tests ATorch's own averagers of DDP, FSDP1 and Megatron; outer steps here are the method outer",
            "common_tests/local_sgd_*_test.py",
        ),
        *_without(
            "starts the trainers of ATorch, on Megatron or transformers",
            "common_tests/trainer/*", "common_tests/dump_snapshot_test.py", "common_tests/training_log_test.py",
            "common_tests/test_event_hook.py",
        ),
        *_without(
            "tests ATorch's loaders for coworkers and shared memory",
            "common_tests/*loader*_test.py", "common_tests/shm_*_test.py", "common_tests/data_utils_test.py",
            "common_tests/elastic_dataset_test.py", "common_tests/unshuffled_batch_dataloder_test.py",
        ),
        *_without("sets groups of SyncBatchNorm by a helper of ATorch, which torch's convert_sync_batchnorm does with"
                  " process_group=", "common_tests/sync_batch_norm_process_group_test.py"),
        *_without("tests reinforcement learning, which is not here", "rl_tests/*", "test_define_rl_models/*"),
        *_without("tests kernels and layers for GPUs and NPUs, which are not here", "test_modules/*", "npu_ops_test/*",
                  "common_tests/fp8/*", "common_tests/npu_test.py", "common_tests/*moe_test.py"),
        *_without("holds helpers of the tests, and tests profilers of ATorch", "utils/*"),
        Case(
            f"{_TESTS}common_tests/fsdp2/device_mesh_test.py",
            changes=(
                *_ON_CPU,
                Change(r'torch\.device\(type="cuda", index=local_rank\(\)\)', 'torch.device("cpu")',
                       "workers that a test starts itself see the CPU"),
                Change(r", use_device_mesh=True\)", ")", "use_device_mesh= left out: every group has a mesh"),
                Change(r"^    get_root_device_mesh,\n", "", "get_root_device_mesh is not imported"),
                Change(r"^from atorch\.utils\.version import torch_version$",
                       "torch_version = lambda: (2, 11, 0)", "torch_version() is a constant"),
                Change(r"^from meshwright\.atorch\.common\.util_func import find_free_port$",
                       "from torch.distributed.elastic.utils.distributed import get_free_port as find_free_port",
                       "find_free_port is torch's"),
            ),
            ranks=(0,),
            run="-m unittest device_mesh_test.DeviceMeshTest.test_device_mesh_one_group"
            " device_mesh_test.DeviceMeshTest.test_device_mesh_multi_group",  # pytest would import ATorch's own package
        ),
        Case(
            f"{_TESTS}common_tests/clip_grad_norm_test.py",
            because="compares the norm with FSDP1's to the bit, and reads norms by helpers of ATorch; clip_grad_norm"
            " is compared with one process in tests/compat/test_atorch.py and tests/training",
        ),
        Case(
            "examples/auto_accelerate/train.py",
            sizes=(
                Change(r"^            optim\.step\(\)$",
                       "            optim.step()\n            if atorch.rank() == 0:\n"
                       "                print('loss:', loss.item())",
                       "it prints its losses"),
            ),
            run="-m examples.auto_accelerate.train --model_type gpt2 --datasize 80 --epoch 1 --distributed"
            " --load_strategy --use_fsdp --use_checkpointing --optim_grouped_params",
            project=True,
        ),
        Case(
            "examples/nanoGPTATorch/train_atorch.py",
            sizes=(
                Change(r"np\.memmap\(.*\)", "np.random.RandomState(0).randint(0, 64, 4096).astype(np.uint16)",
                       "random words in place of OpenWebText"),
                Change(r"^from torch\.utils\.tensorboard import SummaryWriter$",
                       "from unittest.mock import MagicMock\nSummaryWriter = lambda path: MagicMock()",
                       "no TensorBoard"),
                Change(r'init_distributed\("nccl"', 'init_distributed("gloo"', "gloo in place of NCCL"),
            ),
            changes=(
                Change(r"model\.clip_grad_norm_\(grad_clip\)", "atorch.clip_grad_norm(model, grad_clip)",
                       "clip_grad_norm in place of FSDP1's method"),
            ),
            run="{file} --batch_size=4 --block_size=16 --n_layer=2 --n_head=2 --n_embd=32 --max_iters=9 --eval_iters=1"
            " --dtype=bfloat16 --learning_rate=0.01 --decay_lr=False",
            project=True,
        ),
    ),
)  # fmt: skip
