"""ColossalAI's test suite, and its example programs."""

from __future__ import annotations

from .suite import Case, Change, Suite

# --- Reasons why a file does not apply.

_OWN_TENSORS = "tests ColossalAI's own sharded tensors and meshes; here they are torch's DTensor and DeviceMesh"
_OWN_ZERO = "tests the engine below a plugin (GeminiDDP, LowLevelZeroOptimizer), which is torch's FSDP2 here"
_OWN_SHARDFORMER = "tests Shardformer's layers and policies, which divide models there; here a plan or a proof does"
_OWN_SCHEDULES = "tests parts of ColossalAI's schedules, which are torch's here; execute_pipeline has tests of its own"
_OWN_FX = "tests ColossalAI's tracing and search by torch.fx; plan() traces by fake tensors"
_INFERENCE = "serves models; there is no inference engine here"
_LEGACY = "tests what ColossalAI itself calls legacy and does not run by default"
_KERNELS = "tests CUDA and Triton kernels; here they are torch's"
_FP8 = "tests functions of ColossalAI's fp8; here use_fp8 and fp8_communication are the methods fp8 and comm"
_LAZY = "tests tensors without values; a model is built whole here"
_DIST_OPTIMIZERS = (
    "feeds the optimizer ColossalAI's own sharded tensors; the optimizers have parity tables over every layout here"
)

_HELPERS = "no test, but what the tests beside it use"

_NOT_HERE = (
    Case("tests/test_checkpoint_io/utils.py", _HELPERS),
    Case("tests/test_optimizer/_utils.py", _HELPERS),
    Case("tests/test_analyzer/*", _OWN_FX),
    Case("tests/test_auto_parallel/*", _OWN_FX),
    Case("tests/test_autochunk/*", "cuts activations of inference into chunks; there is no such method here"),
    Case("tests/test_fx/*", _OWN_FX),
    Case("tests/test_infer/*", _INFERENCE),
    Case("tests/test_smoothquant/*", _INFERENCE),
    Case("tests/test_legacy/*", _LEGACY),
    Case("tests/test_cluster/*", _OWN_TENSORS),
    Case("tests/test_device/*", _OWN_TENSORS),
    Case("tests/test_tensor/*", _OWN_TENSORS),
    Case("tests/test_config/*", "reads a configuration as a Python module, which is run; settings are arguments here"),
    Case("tests/test_fp8/*", _FP8),
    Case("tests/test_lazy/*", _LAZY),
    Case("tests/test_moe/*", "tests the expert layers that ColossalAI puts in the place of transformers'"),
    Case("tests/test_pipeline/*", _OWN_SCHEDULES),
    Case("tests/test_shardformer/*", _OWN_SHARDFORMER),
    Case("tests/test_zero/*", _OWN_ZERO),
    Case("tests/test_optimizer/test_dist_*.py", _DIST_OPTIMIZERS),
    Case("tests/test_optimizer/test_adam_kernel.py", _KERNELS),
    Case("tests/test_optimizer/test_nvme.py", "keeps states on a disk by the optimizer; here the method offload does"),
    Case(
        "tests/test_booster/test_plugin/test_dp_plugin_base.py",
        "writes a plugin with ColossalAI's methods; a plugin here is a class with a method strategy()",
    ),
    Case(
        "tests/test_checkpoint_io/test_general_checkpoint_io.py", "tests CheckpointIO classes; the Booster saves here"
    ),
    Case("tests/test_checkpoint_io/test_safetensors_async_io.py", "tests functions below the Booster's saving"),
    Case(
        "tests/test_checkpoint_io/test_torch_fsdp_checkpoint_io.py",
        "reads the state of FSDP1's wrapper, which FSDP2 does not have; saved files have tests of their own",
    ),
    Case("tests/test_checkpoint_io/test_low_level_zero_checkpoint_io.py", _OWN_ZERO),
    Case(
        "tests/test_optimizer/test_adam_optim.py",
        "imports Shardformer, and gives gradients of another type than the weights', which torch's Adam refuses; "
        "HybridAdam, CPUAdam and FusedAdam have tests against torch's here",
    ),
    Case("tests/test_checkpoint_io/test_gemini_checkpoint_io.py", _OWN_ZERO),
    Case("tests/test_checkpoint_io/test_gemini_torch_compability.py", _OWN_ZERO),
)

# --- Changes.

_MODULE = Change(
    r"    assert isinstance\(model\.module, (DDP|FSDP)\)\n",
    "",
    "model.unwrap() is the model; there is no module around it",
)
_SYNC = (
    Change(r"booster\.checkpoint_io\._sync_d2h\(\)", "meshwright.wait_for_saves()", "wait_for_saves() for _sync_io()"),
    Change(r"^ *booster\.checkpoint_io\._sync_io\(\)\n", "", "wait_for_saves() for _sync_io()"),
)
_FX = Change(
    r"from meshwright\.fx import is_compatible_with_meta",
    "is_compatible_with_meta = lambda: True",
    "what asks for torch's age is left out",
)
_NO_COLO = "parameters are torch's"
_RESETS = "what resets Shardformer's own counters is left out"
_SMALL = "few small images, to end in minutes without a GPU"
_COPY = "a copy of the parameters alone: FSDP2 refuses to deep-copy its modules"
_OPTIMIZER_FILE = Change(
    r'f"\{optimizer_ckpt_path\}\.safetensors"',
    'f"{optimizer_ckpt_path}.pt"',
    "an optimizer's file is no .safetensors",
)
_PYTEST = "-m pytest -q -x {file}"


def _test(files: str, *changes: Change, timeout_s: float = 500.0) -> Case:
    return Case(files, changes=changes, ranks=(0,), run=_PYTEST, timeout_s=timeout_s)


_TESTS = (
    _test(
        "tests/test_booster/test_accelerator.py",
        Change(r'\["cpu", "cuda"\]', '["cpu"]', "the device that there is"),
    ),
    _test(
        "tests/test_booster/test_mixed_precision/test_fp16_torch.py",
        Change(r'get_sub_registry\("timm"\)', 'get_sub_registry("custom")', "models of the suite's own"),
    ),
    _test(
        "tests/test_booster/test_plugin/test_torch_ddp_plugin.py",
        _MODULE,
        Change(
            r"registry = model_zoo$", 'registry = model_zoo.get_sub_registry("custom")', "models of the suite's own"
        ),
    ),
    _test(
        "tests/test_booster/test_plugin/test_torch_fsdp_plugin.py",
        _MODULE,
    ),
    _test(
        "tests/test_booster/test_plugin/test_low_level_zero_plugin.py",
        Change(
            r"registry = model_zoo$", 'registry = model_zoo.get_sub_registry("custom")', "models of the suite's own"
        ),
    ),
    _test(
        "tests/test_booster/test_plugin/test_gemini_plugin.py",
        _FX,
        Change(r'\["torchvision", "transformers", "diffusers"\]', '["transformers_llama"]', "one family of models"),
        Change(r"^from meshwright\.tensor\.colo_parameter import ColoParameter\n", "", _NO_COLO),
        Change(
            r"^ *for n, p in model\.named_parameters\(\):\n *assert isinstance\(p, ColoParameter\).*\n", "", _NO_COLO
        ),
    ),
    _test(
        "tests/test_booster/test_plugin/test_3d_plugin.py",
        _FX,
        Change(
            r"origin_model, origin_optimizer, _, dataloader, _ = booster\.boost\(\s*origin_model, origin_optimizer,",
            "origin_model, *_ = booster.boost(origin_model,",
            "an optimizer that has stepped is not boosted",
        ),
        timeout_s=900,
    ),
    _test("tests/test_checkpoint_io/test_torch_ddp_checkpoint_io.py", _MODULE, *_SYNC, _OPTIMIZER_FILE),
    _test(
        "tests/test_checkpoint_io/test_plugins_huggingface_compatibility.py",
        Change(r"only_rank_0=False", "", "state_dict() as torch has it"),
    ),
    _test(
        "tests/test_checkpoint_io/test_hybrid_parallel_plugin_checkpoint_io.py",
        *_SYNC,
        _OPTIMIZER_FILE,
        Change(r"^from meshwright\.(shardformer|tensor)\..*\n", "", _RESETS),
        Change(r"^ *(Randomizer\.reset_index|clear_layout_converter)\(\)\n", "", _RESETS),
    ),
    _test(
        "tests/test_lora/test_lora.py",
        Change(r"AdamW\(model\.parameters", "AdamW(model_save.parameters", "the optimizer is over the model to boost"),
        Change(r"^from .* import HybridParallelModule\n", "", "model.unwrap() is the model"),
        Change(r"^ *if isinstance\(model_load, HybridParallelModule\):\n.*\n", "", "model.unwrap() is the model"),
        Change(
            r'^        \{\n *"lora_config": lora_config,\n *"quantize": True,\n        \},\n',
            "",
            "no quantised weights",
        ),
        Change(
            r"save_lora_as_pretrained\((.*)\)",
            r"save_lora_as_pretrained(\1, use_safetensors=False)",
            "use_safetensors=False for a .bin file",
        ),
        Change(
            r"copy\.deepcopy\(model_load\)",
            "[(n, p.detach().clone()) for n, p in model_load.named_parameters()]",
            _COPY,
        ),
        Change(r"model_copy\.named_parameters\(\)", "model_copy", _COPY),
    ),
    _test("tests/test_optimizer/test_lr_scheduler.py"),
)

# --- Example programs, tiny and on random data.

_TINY = "a model of some ten thousand weights"
_DEVICE_DATA = "random data"

_LLAMA = (
    Change(
        r"^MODEL_CONFIGS = \{\n",
        "MODEL_CONFIGS = {\n"
        '    "tiny": LlamaConfig(max_position_embeddings=64, num_hidden_layers=4, num_attention_heads=4,\n'
        "        intermediate_size=48, hidden_size=32, vocab_size=96),\n",
        _TINY,
    ),
    Change(r"^from meshwright\.(pipeline\.schedule\.v_schedule|shardformer) import .*\n", "", "unused names left out"),
)
_GPT = Change(
    r'"118M": GPT2Config\(activation_function="gelu"\)',
    '"118M": GPT2Config(n_embd=32, n_head=4, n_layer=4, n_positions=64, vocab_size=96, activation_function="gelu")',
    _TINY,
)
_CIFAR_DATA = r"torchvision\.datasets\.CIFAR10\(\s*root=data_path, train=\w+, transform=(\w+), download=True\s*\)"
_CIFAR = (
    Change(_CIFAR_DATA, r"torchvision.datasets.FakeData(400, (3, 32, 32), 10, transform=\1)", _DEVICE_DATA),
    Change(r"^NUM_EPOCHS = \d+", "NUM_EPOCHS = 1", _SMALL),
    Change(r"build_dataloader\(100,", "build_dataloader(20,", _SMALL),
)
# In fp16, whose convolutions are slow without a GPU.
_CIFAR_FP16 = (
    Change(_CIFAR_DATA, r"torchvision.datasets.FakeData(100, (3, 32, 32), 10, transform=\1)", _DEVICE_DATA),
    Change(r"^NUM_EPOCHS = \d+", "NUM_EPOCHS = 1", _SMALL),
    Change(r"build_dataloader\(100,", "build_dataloader(5,", _SMALL),
)
_GEMINI_DEMO = (
    Change(r"^ *assert version\.parse\(CAI_VERSION\).*\n", "", "what asks for ColossalAI's version is left out"),
    Change(r"checkpoint=True\)\.cuda\(\)", "checkpoint=True)", _TINY),
    Change(r"model_builder\(args\.model_type\)\(checkpoint=True\)", "tiny(checkpoint=True)", _TINY),
    Change(
        r"from commons\.model_zoo import model_builder",
        "from commons.model_zoo import GPTLMModel\n\n\ndef tiny(checkpoint):\n"
        "    return GPTLMModel(32, 2, 4, 64, 96, checkpoint)\n",
        _TINY,
    ),
    Change(r"SEQ_LEN = 1024", "SEQ_LEN = 16", _TINY),
    Change(r"VOCAB_SIZE = 50257", "VOCAB_SIZE = 96", _TINY),
)
_OPT = (
    Change(
        r"AutoConfig\.from_pretrained\(args\.model_name_or_path\)",
        "transformers.OPTConfig(vocab_size=96, hidden_size=32, num_hidden_layers=2, ffn_dim=64, num_attention_heads=4,"
        " word_embed_proj_dim=32, max_position_embeddings=64)",
        _TINY,
    ),
    Change(r"SEQ_LEN = 1024", "SEQ_LEN = 16", _TINY),
    Change(r"VOCAB_SIZE = 50257", "VOCAB_SIZE = 96", _TINY),
    Change(
        r"( *)booster\.backward\(loss, optimizer\)",
        r"\1booster.backward(loss, optimizer)\n\1print('loss:', loss.item())",
        "prints its losses",
    ),
)  # fmt: skip
_PALM = (
    Change(
        r"from meshwright\.nn import HybridAdam",
        "from meshwright.nn.optimizer import HybridAdam",
        "HybridAdam comes from nn.optimizer",
    ),
    Change(r"PaLM\(num_tokens=50304, dim=4096, depth=64\)", "PaLM(num_tokens=128, dim=64, depth=2)", _TINY),
    Change(r"^NUM_BATCHES = .*", "NUM_BATCHES = 12", _TINY),
    Change(r"^WARMUP_BATCHES = .*", "WARMUP_BATCHES = 1", _TINY),
    Change(r"^SEQ_LEN = .*", "SEQ_LEN = 32", _TINY),
    Change(r"90000000|5000000", "9000", _TINY),
)
_EXAMPLES = (
    Case(
        "examples/language/llama/benchmark.py",
        changes=_LLAMA,
        run="{file} -c tiny -p gemini -b 4 -s 8 -l 16 -i 1 -g",
        project=True,
    ),
    Case(
        "examples/language/gpt/hybridparallelism/benchmark.py",
        changes=(_GPT,),
        run="{file} -c 118M -p gemini_auto -b 2 -s 8 -l 16 -i 1",
        project=True,
    ),
    Case(
        "examples/images/resnet/train.py",
        changes=_CIFAR,
        run="{file} -p torch_ddp -i 1",
        project=True,
    ),
    Case(
        "examples/tutorial/new_api/cifar_resnet/train.py",
        changes=_CIFAR_FP16,
        run="{file} -p low_level_zero -i 0",
        project=True,
        timeout_s=900,
    ),
    Case(
        "examples/language/gpt/gemini/train_gpt_demo.py",
        changes=_GEMINI_DEMO,
        run="{file} --distplan CAI_ZeRO2 --batch_size 2 --train_step 10",
        project=True,
    ),
    Case(
        "examples/language/opt/opt_benchmark.py",
        changes=_OPT,
        run="{file} --plugin gemini --batch_size 2 --max_train_steps 10",
        project=True,
    ),
    Case(
        "examples/language/palm/train.py",
        changes=_PALM,
        run="{file} --distplan meshwright --plugin low_level_zero --batch_size 2 --dummy_data True",
        project=True,
    ),
)

SUITE = Suite(
    name="colossalai",
    title="ColossalAI",
    repository="hpcaitech/ColossalAI",
    files=("tests/*test_*.py", *(case.files for case in _EXAMPLES)),
    imports=(
        Change(
            r"^from colossalai\.testing(\.random|\.utils)? import",
            "from benchmarks.upstream.colossalai_testing import",
            "what tests import of ColossalAI's own testing tools is written anew",
        ),
        Change(r"\bcolossalai\b(?!\.org)", "meshwright", "the import"),
        Change(r', backend="nccl"', "", "the backend of the device"),
        Change(r"^from \. import custom, diffusers, timm, torchaudio, torchvision, transformers$",
               "from . import custom, transformers", "models of other packages are left out"),
        Change(r"^from \.chatglm2 import \*\n", "", "a model whose code would be downloaded is left out"),
        Change(r"^from \.simple_mlp import \*\n", "", "a model of Shardformer's layers is left out"),
    ),
    cases=(*_NOT_HERE, *_TESTS, *_EXAMPLES),
    losses=r"[lL]oss[\"']?\s*[:=|]\s*([-+0-9.e]+)",
)  # fmt: skip
