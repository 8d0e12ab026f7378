"""`megascale import-config` as a user meets it: scripts of Megatron-LM in its examples' forms, YAML, and torchtitan."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megascale.cli.main import main
from megascale.config.foreign.imported import UNKNOWN, import_arguments, read_arguments
from megascale.config.loading import load_config
from tests.data.datasets import ORIGIN, write_documents

GPT3 = """\
#!/bin/bash
# 175 billion parameters: SAVE LOGS VOCAB MERGES DATA
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
NODES=${NODES:-256}
WORLD=$(($GPUS*$NODES))
SAVE=$1; LOGS=$2
LAUNCH=(
    --nproc_per_node $GPUS
    --nnodes $NODES
)
MODEL=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
    --attention-backend auto # or another one
    --init-method-std 0.006
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --step-batch-size-schedule "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536"
    --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --fp16
    --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001 --lr-decay-iters 430000
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
)
DATA=(--data-path $5 --vocab-file $3 --merge-file $4 --split 949,50,1)
OUTPUT=(
    --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10
    --save $SAVE --load $SAVE --tensorboard-dir $LOGS
)
torchrun ${LAUNCH[@]} pretrain_gpt.py \\
    ${MODEL[@]} \\
    ${TRAINING[@]} ${DATA[@]} \\
    ${OUTPUT[@]}
"""

LLAMA3 = """\
SAVE=${1:-"checkpoints/llama"}
TOKENIZER=${2:-"MOCK"}
DTYPE="fp8"
SEQUENCE=8192
PROGRAM="pretrain_gpt.py"
LAUNCH=(--nproc_per_node 8 --nnodes 1)
MODEL=(
    --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length $SEQUENCE --max-position-embeddings $SEQUENCE
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --normalization RMSNorm --apply-layernorm-1p
    --init-method-std 0.0134 --attention-backend fused
    --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 128
    --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
    --lr 0.00015 --min-lr 0.00001 --lr-decay-style cosine
    --decoupled-lr 5.0e-4 # of the embedding and the head
    --decoupled-min-lr 4.5e-5
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --calculate-per-token-loss
    --manual-gc --empty-unused-memory-level 1 --exit-duration-in-mins 235
)
FP8=()
if [[ "$DTYPE" == "fp8" ]]; then
    FP8+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi
PARALLEL=(
    --tensor-model-parallel-size 1
    # --pipeline-model-parallel-size 2
    --sequence-parallel  # always
)
PARALLEL+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
TRAINING+=("${PARALLEL[@]}")
DATA=()
if [[ "$TOKENIZER" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    DATA+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'" "--num-workers 1")
else
    DATA+=("--data-path $3" "--tokenizer-model $TOKENIZER" "--vocab-size 128256")
fi
if [ ! -f "$PROGRAM" ]; then
    echo "there is no $PROGRAM"
    exit 1
fi
torchrun ${LAUNCH[@]} \\
    "$PROGRAM" \\
    ${MODEL[@]} ${TRAINING[@]} ${FP8[@]} ${DATA[@]} \\
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 \\
    --distributed-timeout-minutes 60 --save "$SAVE" --load "$SAVE"
"""

BRIDGE = {
    "8b": {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
           "context_parallel_size": 2},
    "70b": {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64,
            "tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 4, "sequence_parallel": "true",
            "virtual_pipeline_model_parallel_size": 5, "context_parallel_size": 2},
    "405b": {"num_layers": 126, "hidden_size": 16384, "ffn_hidden_size": 53248, "num_attention_heads": 128,
             "tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 8, "sequence_parallel": "true",
             "virtual_pipeline_model_parallel_size": 2, "context_parallel_size": 4, "seq_length": 131072,
             "account_for_embedding_in_pipeline_split": "true", "account_for_loss_in_pipeline_split": "true"},
}  # fmt: skip
"""What differs between the pre-training recipes of Llama 3 in Megatron Bridge."""

BRIDGE_MODEL = {
    "seq_length": 8192, "num_query_groups": 8, "kv_channels": 128, "vocab_size": 128256, "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5, "gated_linear_unit": "true", "activation_func": "torch.nn.functional.silu",
    "position_embedding_type": "rope", "rotary_base": 500000, "rotary_percent": 1.0, "add_bias_linear": "false",
    "share_embeddings_and_output_weights": "false", "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "init_method_std": 0.02, "attention_backend": "null", "cross_entropy_loss_fusion": "true",
    "cross_entropy_fusion_impl": "te", "transformer_impl": "transformer_engine", "recompute_granularity": "null",
}  # fmt: skip

SILU = "{_target_: torch.nn.functional.silu, _call_: false}"

BRIDGE_REST = """\
train: {train_iters: 1168251, global_batch_size: 512, micro_batch_size: 1, manual_gc: true, manual_gc_interval: 100}
validation: {eval_interval: 2000, eval_iters: 32}
optimizer: {optimizer: adam, lr: 0.0003, min_lr: 0.00003, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 0.00000001,
    weight_decay: 0.1, clip_grad: 1.0, use_distributed_optimizer: true, use_precision_aware_optimizer: false}
scheduler: {lr_decay_style: cosine, lr_warmup_iters: 2000, lr_decay_iters: null, start_weight_decay: 0.033,
    end_weight_decay: 0.033, weight_decay_incr_style: constant, lr_wsd_decay_style: minus_sqrt}
ddp: {overlap_grad_reduce: true, overlap_param_gather: true, check_for_nan_in_grad: true, grad_reduce_in_fp32: true,
    average_in_collective: true, use_distributed_optimizer: true, data_parallel_sharding_strategy: no_shard}
dataset: {split: "9999,8,2", dataloader_type: single, num_workers: 8, mock_data: true, blend: null}
logger: {log_interval: 10, tensorboard_dir: tb_logs, log_timers_to_tensorboard: true}
checkpoint: {save: checkpoints, load: checkpoints, save_interval: 500, ckpt_format: torch_dist,
    fully_parallel_save: true}
rng: {seed: 1234}
mixed_precision: bf16_mixed
"""

TITAN = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "FLAVOR"
converters = CONVERTERS
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
[checkpoint]
enable = false
interval = 500
[activation_checkpoint]
mode = "full"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
filter_fqns = ["output"]
[validation]
enable = false
dataset = "c4_validation"
freq = 500
steps = 1200
"""


def write_dataset(prefix: Path) -> None:
    """Write a dataset of a few documents, with GPT-2's vocabulary."""
    prefix.parent.mkdir(exist_ok=True)
    write_documents(prefix, [np.arange(4000)] * 200, ORIGIN, 50257)


def imported(tmp_path: Path, name: str, text: str, *words: str) -> Path:
    """Import a source to a file."""
    source, output = tmp_path / name, tmp_path / "imported.toml"
    source.write_text(text)
    assert main(["import-config", str(source), *words, "--output", str(output)]) == 0
    return output


def check(path: Path, gpus: int, *overrides: str) -> None:
    assert main(["check", str(path), "--gpus", str(gpus), *overrides]) == 0


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NODES", raising=False)


def test_a_script_of_gpt3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "corpus")
    output = imported(tmp_path, "train.sh", GPT3, "ckpt", "logs", "vocab.json", "merges.txt", "corpus")
    report = capsys.readouterr().out.splitlines()
    assert report[0] == "34 arguments: 32 mapped, 2 dropped; 6 other defaults of Megatron-LM written"
    assert {"converted --fp16", "converted --lr-warmup-fraction"} < {line.partition(":")[0] for line in report}
    assert [line.partition(":")[0] for line in report if line.startswith("dropped")] == [
        "dropped --max-position-embeddings", "dropped --vocab-file",
    ]  # fmt: skip
    config = load_config(str(output), ["train.eval_every=0"], world_size=2048)
    assert (config.model.vocab_size, config.model.activation, config.model.dropout) == (50257, "gelu_tanh", 0.1)
    assert (config.optimizer.warmup_steps, config.optimizer.schedule_steps) == (431, 430_000)
    assert (config.batch.rampup, config.train.precision) == ([16, 304, 5_859_375], "bf16")
    assert (config.parallel.zero, config.overlap.tp, config.dp) == (0, False, 16)
    assert config.name == "imported" and config.output_dir == str(tmp_path / "ckpt")
    check(output, 2048, "train.eval_every=0")


def test_a_script_of_llama3_in_fp8(tmp_path: Path) -> None:
    output = imported(tmp_path, "train.sh", LLAMA3, "--without", "decoupled-lr")
    config = load_config(str(output), world_size=8)
    assert (config.model.norm, config.model.rope_theta, config.model.tie_embeddings) == ("rmsnorm_1p", 1e6, False)
    assert (config.train.precision, config.fp8.recipe, config.fp8.history) == ("fp8", "delayed", 1024)
    assert (config.fp8.first_layers_bf16, config.fp8.last_layers_bf16) == (0, 0)
    assert config.train.steps == 1953125000 // 128 and config.optimizer.schedule_steps == 1949218748 // 128
    assert (config.comm.timeout_s, config.launch.start_timeout_s) == (3600, 3600)
    assert config.data.mock and config.parallel.sp is False
    check(output, 8)


@pytest.mark.parametrize(("size", "gpus"), [("8b", 2), ("70b", 32), ("405b", 256)])
def test_tables_of_megatron_bridge(size: str, gpus: int, tmp_path: Path) -> None:
    values = BRIDGE_MODEL | BRIDGE[size] | ({"activation_func": SILU, "apply_rope_fusion": "true"} if gpus == 2 else {})
    model = "".join(f"  {name}: {value}\n" for name, value in values.items())
    output = imported(tmp_path, "run.yaml", f"model:\n{model}{BRIDGE_REST}", "--gpus", str(gpus))
    config = load_config(str(output), world_size=gpus)
    assert (config.model.activation, config.model.bias, config.model.num_kv_heads) == ("swiglu", False, 8)
    assert (config.optimizer.weight_decay, config.parallel.zero) == (0.033, 1)
    assert config.train.precision == "bf16"
    check(output, gpus)


@pytest.mark.parametrize("flavor", ["8B", "70B", "405B"])
@pytest.mark.parametrize("fp8", [False, True])
def test_files_of_torchtitan(flavor: str, fp8: bool, tmp_path: Path) -> None:
    text = TITAN.replace("FLAVOR", flavor).replace("CONVERTERS", '["float8"]' if fp8 else "[]")
    output = imported(tmp_path, "llama.toml", text, "--gpus", "256")
    write_dataset(tmp_path / "data/c4")
    config = load_config(str(output), world_size=256)
    assert config.model.preset == f"llama3.1-{flavor.lower()}" and config.batch.total == 2 * 256 // 8
    assert (config.train.precision, config.optimizer.decay) == ("fp8" if fp8 else "bf16", "linear")
    assert (config.parallel.zero, config.parallel.resharding) == (3, "forward")
    check(output, 256)


@pytest.mark.parametrize(("name", "gpus"), [("llama3_8b", 64), ("llama3_70b", 256), ("llama3_405b", 512)])
def test_published_configurations(name: str, gpus: int, tmp_path: Path) -> None:
    output = tmp_path / "run.toml"
    assert main(["import-config", f"torchtitan:{name}", "--gpus", str(gpus), "--output", str(output)]) == 0
    write_dataset(tmp_path / "data/c4")
    check(output, gpus)
    command = "torchrun --nproc_per_node=8 -m torchtitan.train --module llama3 --config NAME --training.steps 700"
    again = imported(tmp_path, "run.sh", command.replace("NAME", name), "--gpus", str(gpus))
    assert load_config(str(again)).train.steps == 700


@pytest.mark.parametrize(("source", "gpus"), [
    (GPT3, 2048), (LLAMA3.replace("--decoupled-lr 5.0e-4", ""), 8), ("torchtitan:llama3_8b", 64),
    ("torchtitan:llama3_70b", 256),
])  # fmt: skip
def test_a_plan_says_what_an_imported_run_costs(
    source: str, gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, script = tmp_path / "run.toml", tmp_path / "run.sh"
    script.write_text(source)
    name = source if ":" in source.splitlines()[0] and "$" not in source else str(script)
    words = [name, "a", "b", "c", "d", "e", "--gpus", str(gpus), "--output", str(output)]
    assert main(["import-config", *words]) == 0
    capsys.readouterr()
    assert main(["plan", str(output), "--gpus", str(gpus), "--hardware", "gb300", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] > 0.1


REMOVE = "remove it from the source, or by --without, or add its setting"


def refused(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str], *words: str, name: str = "run.sh") -> str:
    """Import a source that is refused: nothing is written."""
    source, output = tmp_path / name, tmp_path / "imported.toml"
    source.write_text(text)
    assert main(["import-config", str(source), *words, "--output", str(output)]) == 2
    assert not output.exists()
    return re.sub(rf"{re.escape(str(source))}(:\d+)?  ", "", capsys.readouterr().err)


def test_everything_refused_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LLAMA3.replace("--bf16", "--bf16 --squared-relu --no-such $MORE")
    assert (
        refused(tmp_path, text, capsys).replace(f"  -> {REMOVE}", "")
        == """\
--decoupled-lr: not supported: the least rate of a group is min_lr x lr_mult, too
--squared-relu: not supported: one of the choices of model.activation
--no-such: MORE has no value in the script
3 problems
"""
    )


def test_a_refusal_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the name stands in several lines, or in a comment alone."""
    (source := tmp_path / "run.sh").write_text(
        "# --squared-relu\nread LR\npretrain_gpt.py --num-layers 4 \\\n --lr $LR \\\n --spec x \\\n --spec a\n"
    )
    assert main(["import-config", str(source)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"{source}:4  --lr: LR has no one value: `read LR` of line 2 may set it in the script")
    assert lines[1].startswith(f"{source}  --spec: not supported")


SMALL = (
    "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 512 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 20 --lr 1e-3 --mock-data "
)


@pytest.mark.parametrize("flag", ["--job.config_file ", "--job.config_file="])
def test_a_script_of_torchtitan_with_a_file(flag: str, tmp_path: Path) -> None:
    (tmp_path / "llama.toml").write_text(TITAN.replace("FLAVOR", "8B").replace("CONVERTERS", "[]"))
    script = f'torchrun --nproc_per_node=8 -m torchtitan.train {flag}./llama.toml --training.steps 700 "$@"'
    config = load_config(str(imported(tmp_path, "run.sh", script)), skip_sections={"data"})
    assert (config.model.preset, config.train.steps, config.batch.micro) == ("llama3.1-8b", 700, 2)


def test_an_output_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "run.toml"
    source.write_text(TITAN)
    assert main(["import-config", str(source), "--output", str(source)]) == 2
    assert "run.toml is there already" in capsys.readouterr().err and source.read_text() == TITAN


@pytest.mark.parametrize(("words", "problem"), [
    ("model.vocabsize=1", "model.vocabsize: no such key"), ("data.trane=a", "data.trane: no such key"),
    ("modle.bias=true", "modle.bias: no such key"), ("--without fpp16,lr", "--without: the source has no fpp16"),
])  # fmt: skip
def test_words_without_effect(words: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(tmp_path, SMALL, capsys, *words.split()).startswith(f"command line  {problem}")


@pytest.mark.parametrize("flags", ["--context-parallel-size 2", "--softmax-type learnable"])
def test_a_default_that_has_an_effect_is_not_left_out(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = refused(tmp_path, SMALL + flags, capsys, "--gpus", "2")
    assert problem.startswith("model.dropout: ")
    assert " has no dropout; 0.1 is the default of Megatron-LM  -> " in problem and "by --hidden-dropout, " in problem
    output = imported(tmp_path, "run.sh", SMALL + flags, "model.dropout=0", "--gpus", "2")
    assert load_config(str(output), world_size=2).model.dropout == 0


def test_a_setting_takes_the_place_of_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LLAMA3.replace("--decoupled-lr 5.0e-4", "").replace('--load "$SAVE"', "--load theirs")
    assert "--load: auto, the default" in refused(tmp_path, text, capsys)
    output = imported(tmp_path, "train.sh", text, "checkpoint.resume=never")
    assert load_config(str(output), skip_sections={"data"}).checkpoint.resume == "never"


def test_variables_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("ckpt", "logs", "vocab.json", "merges.txt", "corpus")
    monkeypatch.setenv("NODES", "16")
    assert load_config(str(imported(tmp_path, "train.sh", GPT3, *words)), skip_sections={"data"}).model.num_layers == 96
    (tmp_path / "imported.toml").unlink()
    monkeypatch.setenv("NODES", "2")
    problems = refused(tmp_path, GPT3, capsys, *words)
    assert problems.startswith("command line  --gpus: ") and "16" in problems


@pytest.mark.parametrize(("name", "text", "problem"), [
    ("run.sh", "echo hello", "has no command of pretrain_gpt.py or torchtitan  -> a training script"),
    ("run.sh", "torchrun pretrain_gpt.py $ARGS", "$ARGS: ARGS has no value in the script"),
    ("run.sh", "torchrun pretrain_gpt.py \\ \n --lr 1", "has a backslash with spaces behind it, which joins no lines"),
    ("run.sh", "pretrain_gpt.py --num-layer 1", f"--num-layer: {UNKNOWN}  -> did you mean --num-layers? If not"),
    ("run.toml", "training.stepz = 1\ntraining.global_batch_size = 8", f"training.stepz: {UNKNOWN}  -> did you mean "
     "training.steps?"),
    ("run.toml", "training.steps = 1", "training.global_batch_size: local_batch_size x dp by default: give --gpus N"),
    ("run.sh", "python pretrain_t5.py --lr 1", "pretrain_t5.py: trains a model of another kind  -> a script of "
     "pretrain_gpt.py"),
    ("run.sh", "-m torchtitan.train --config llama3_8", "llama3_8: is a Python function of torchtitan, which is not "
     "run  -> did you mean llama3_8b?"),
    ("run.yaml", "a: [", "cannot be read: while parsing"), ("run.yaml", "3", "cannot be read: not a table"),
    ("run.yaml", "MODEL_ARGS: [1, 2]", "cannot be read: not a table"),
    ("run.yaml", "1: 2", "1: unknown: "),
    ("run.toml", "a =", "cannot be read: Invalid value"),
    ("run.yaml", "model: !!python/object:os.system {}", "cannot be read: could not determine a constructor"),
])  # fmt: skip
def test_sources_that_cannot_be_imported(
    name: str, text: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(tmp_path, text, capsys, name=name).startswith(problem)


def test_a_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-config", "no.sh"]) == 2
    assert capsys.readouterr().err.startswith("no.sh  cannot be read: No such file or directory")


def test_training_commands_that_differ_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"{SMALL}\n[ -f x ] && {SMALL} --bf16"
    assert "has 2 training commands  -> leave one of them in a copy" in refused(tmp_path, text, capsys)


@pytest.mark.parametrize(("blend", "data"), [
    ("[[a, b], [0.3, 0.7]]", [[0.3, "a"], [0.7, "b"]]), ("[[a], null]", "a"), ("[[a], [1.0]]", [[1, "a"]]),
])  # fmt: skip
def test_blends_of_megatron_bridge(blend: str, data: object, tmp_path: Path) -> None:
    (path := tmp_path / "run.yaml").write_text(f"dataset: {{blend: {blend}, blend_per_split: null}}")
    source = read_arguments(str(path), (), {})
    assert import_arguments(source.system, source.given).settings["data.train"] == data


def test_blends_without_weights_and_other_precisions_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "dataset: {blend: [[a, b], null]}\nmixed_precision: bf16_with_mxfp8_mixed\n"
    words = refused(tmp_path, text, capsys, name="run.yaml")
    assert "dataset.blend: several datasets without weights: theirs are blended by length" in words
    assert "mixed_precision: other recipes are not supported: write train.precision and fp8.recipe" in words


def test_a_setting_fills_a_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = LLAMA3.replace("--vocab-size 128256", "").replace("--decoupled-lr 5.0e-4", "")
    assert "model.vocab_size: missing" in refused(tmp_path, text, capsys)
    output = imported(tmp_path, "run.sh", text, "model.vocab_size=128256", "train.log_every=5")
    config = load_config(str(output))
    assert (config.model.vocab_size, config.train.log_every) == (128256, 5)


def test_a_recipe_and_plain_arguments_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The words of a command line in a file, and `MODEL_ARGS` of a test recipe with variables; to standard output."""
    arguments = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 \\\n"
        "--global-batch-size 8 --train-iters 20 --lr 1e-3 --mock-data --vocab-size 512 --swiglu --split 949,50,1\n"
    )
    recipe = "ENV_VARS: {N: 1}\nMODEL_ARGS:\n" + "".join(
        f"  --{one.strip().replace(' ', ': ') if ' ' in one.strip() else f'{one.strip()}: true'}\n"
        for one in arguments.replace("\\\n", "").split("--")[1:]
    ) + "  --bf16: false\n"  # fmt: skip
    printed = []
    for name, text in (("run.txt", arguments), ("run.yaml", recipe)):
        (tmp_path / name).write_text(text)
        assert main(["import-config", str(tmp_path / name)]) == 0
        written = capsys.readouterr()
        printed.append(written.out)
        assert written.err.startswith("12 arguments: 12 mapped, 0 dropped; ")
    assert printed[0] == printed[1] and printed[0].startswith('name = "run"\n')
