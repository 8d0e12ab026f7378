"""Settings of other systems: every flag of Megatron-LM's example scripts has an answer, and every answer is valid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from megascale.config.foreign.others import TABLES
from megascale.config.foreign.setting import MANY, Advice, Setting, plain
from megascale.config.foreign.translation import SYSTEMS, find, read_flags, translate, translate_all
from megascale.config.loading import load_config, load_config_tree, sections
from megascale.config.run import RunConfig
from megascale.core.errors import ConfigError
from tests.config.test_mistakes import GOOD

GPT3_175B = """\
--nproc_per_node 8 --nnodes 1 --master_addr localhost --master_port 29500
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--attention-backend auto --micro-batch-size 1 --global-batch-size 1536
--step-batch-size-schedule 0:16,2.4B:320 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
--init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
--lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
--data-path corpus_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1
--log-interval 100 --save-interval 10000 --eval-interval 1000 --save ckpt --load ckpt --eval-iters 10
--tensorboard-dir logs --rampup-batch-size 16 16 5859375
"""
"""The options of examples/gpt3/train_gpt3_175b_distributed.sh at d98e8a64, with the ramp-up of earlier versions."""

LLAMA3_8B = """\
--nproc_per_node 8 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000
--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0
--hidden-dropout 0.0 --swiglu --normalization RMSNorm --init-method-std 0.0134 --attention-backend fused
--apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
--global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
--lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
--clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
--cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
--exit-duration-in-mins 235 --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
--fp8-param-gather --tensor-model-parallel-size 1 --context-parallel-size 1 --pipeline-model-parallel-size 1
--sequence-parallel --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --mock-data
--tokenizer-type NullTokenizer --vocab-size 128256 --data-cache-path cache --tiktoken-pattern v2
--split '99,1,0' --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --data-path corpus
--tokenizer-model tokenizer.json --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000
--log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
--distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir logs
"""
"""The options of examples/llama/train_llama3_8b_h100_fp8.sh at d98e8a64, of both kinds of data."""

MORE_FLAGS = """\
--use-cpu-initialization --log-params-norm --log-num-zeros-in-grad --rerun-mode disabled --DDP-impl local
--no-check-for-nan-in-loss-and-grad --microbatch-group-size-per-virtual-pipeline-stage 2 --manual-gc-eval
--dist-ckpt-strictness log_all --start-weight-decay 0 --end-weight-decay 0.1 --weight-decay-incr-style linear
"""
"""Options of other scripts."""

ROWS = [(system, setting) for system, rows in SYSTEMS.items() for setting in rows]


def written(text: str) -> dict[str, Any]:
    """What the flags of a command set here."""
    found = translate_all(read_flags(text.split()))
    return {key: value for _, one in found if one is not None and one.key for key, value in one.settings.items()}


@pytest.mark.parametrize("script", [GPT3_175B, LLAMA3_8B, MORE_FLAGS])
def test_every_flag_of_the_example_scripts_is_answered(script: str) -> None:
    for flag, found in translate_all(read_flags(script.split())):
        assert found is not None, flag
        assert (found.value is not None) if found.key else found.note, flag


def test_the_scripts_become_runs(tmp_path: Path) -> None:
    """What the answers say is a valid configuration, but for the data."""
    for script in (GPT3_175B, LLAMA3_8B):
        settings = written(script) | {"checkpoint.resume": "auto", "data.cache": str(tmp_path)}
        settings |= {"data.mock": True, "optimizer.warmup_steps": 100, "launch.start_timeout_s": 3600.0}
        settings |= {"fp8.recipe": "delayed"} if "fp8.history" in settings else {}
        tree: dict[str, Any] = {"name": "theirs"}
        for key, value in settings.items():
            if key in ("data.train", "data.tokenizer", "data.split", "batch.rampup", "output_dir"):
                continue
            table, _, name = key.partition(".")
            tree.setdefault(table, {})[name] = value
        if "vocab_size" not in tree["model"]:
            tree["model"]["vocab_size"] = 50257
        config = load_config_tree(tree, "the script", world_size=128)
        assert config.model.num_layers in (32, 96)


def test_values_are_converted() -> None:
    settings = written(GPT3_175B)
    assert settings["train.precision"] == "bf16"
    assert settings["optimizer.betas"] == [0.9, 0.95]
    assert settings["optimizer.warmup_steps"] == 431
    assert settings["data.split"] == [949, 51]
    assert settings["batch.rampup"] == [16, 16, 5859375]
    assert settings["checkpoint.resume"] == "auto"
    assert settings["output_dir"] == "ckpt"
    settings = written(LLAMA3_8B)
    assert settings["train.steps"] == 1953125000 // 128
    assert settings["model.norm"] == "rmsnorm_1p"
    assert settings["comm.timeout_s"] == 3600
    assert (settings["model.bias"], settings["model.tie_embeddings"]) == (False, False)
    assert settings["backends.attention"] == "te"


@pytest.mark.parametrize(("words", "value"), [
    ("--data-path 0.3 a 0.7 b", [[0.3, "a"], [0.7, "b"]]),
    ("--data-path a", "a"),
])  # fmt: skip
def test_blends(words: str, value: Any) -> None:
    assert written(words) == {"data.train": value}


@pytest.mark.parametrize(("system", "setting"), ROWS, ids=lambda one: one.names[0] if isinstance(one, Setting) else one)
def test_a_row_is_valid(system: str, setting: Setting) -> None:
    """Its key exists, the values of its words and switches are the key's, and a key that it lacks has a note."""
    if not setting.key:
        assert setting.note
        return
    table, _, name = setting.key.rpartition(".")
    owner = sections()[table] if table else RunConfig
    fields = {field.alias or key: field for key, field in owner.model_fields.items()}
    assert name in fields, setting.key
    values = [*setting.meanings.values()]
    if not setting.takes:
        values += [value for value in [setting.convert((), {})] if not isinstance(value, Advice)]
    field = fields[name]
    adapter = TypeAdapter(field.rebuild_annotation())
    for value in values:
        adapter.validate_python(value, strict=True)


def test_a_different_default_differs() -> None:
    for _, setting in ROWS:
        if setting.theirs is not None:
            table, _, name = setting.key.rpartition(".")
            fields = {field.alias or key: field for key, field in sections()[table].model_fields.items()}
            TypeAdapter(fields[name].rebuild_annotation()).validate_python(setting.theirs, strict=True)
            assert setting.theirs != fields[name].default, setting.names


def test_the_page_has_one_row_of_every_setting() -> None:
    """Every name stands in one row, and its key in the column `write`."""
    from tools.migration import settings

    found = []
    for line in settings():
        if line.startswith("| `"):
            *names, key, _ = re.split(r"(?<!\\)\|", line)[1:-1]
            found += [(name, key.strip(" `").partition(" = ")[0]) for name in re.findall(r"`([^`]+)`", "".join(names))]
    rows = [*SYSTEMS["Megatron-LM"], *SYSTEMS["torchtitan"]]
    assert sorted(found) == sorted((name, one.key) for one in rows for name in one.names)


def test_names_are_found_in_every_spelling() -> None:
    for name in ("--tensor-model-parallel-size", "tensor_model_parallel_size", "tensor-model-parallel-size",
                 "parallel.tensor_model_parallel_size", "--Tensor-Model-Parallel-Size"):  # fmt: skip
        found = translate(name, [4])
        assert found is not None and (found.key, found.value) == ("parallel.tp", 4)
    assert find("--moe-router-topk") is not None and find("--no-such-flag") is None
    assert set(TABLES.values()) <= set(sections())


def test_no_two_rows_have_a_name() -> None:
    names = [plain(name) for _, setting in ROWS for name in setting.names]
    assert len(names) == len(set(names)), [name for name in names if names.count(name) > 1]


@pytest.mark.parametrize(("words", "settings"), [
    ("--lr-warmup-fraction inf --lr-decay-iters 10", {"optimizer.warmup_steps": None, "optimizer.schedule_steps": 10}),
    ("--normalization 5 --train-iters 5e5", {"model.norm": None, "train.steps": 500_000}),
    ("--reduce_bucket_size 5e8", {"overlap.bucket_bytes": 2_000_000_000}),
    ("--ddp-bucket-size abc", {"overlap.bucket_bytes": None}),
    ("--training.dtype float32 --training.mixed_precision_param bfloat16", {"train.precision": "bf16"}),
    ("--dim 64 --hidden_dim 128", {"model.hidden_size": 64, "model.ffn_size": 128}),
    ("--seq-length 2048 --max-position-embeddings 131072", {"model.seq_length": 2048}),
    ("--max-position-embeddings 2048", {"model.seq_length": 2048}),
    ("--adam-beta1 0.8", {"optimizer.betas": [0.8, 0.999]}),
    ("--optimizer.beta1 0.8", {"optimizer.betas": [0.8, 0.95]}),
    ("--optimizer.beta1 0.8 --optimizer.beta2 0.98", {"optimizer.betas": [0.8, 0.98]}),
    ("--model.flavor 8B --training.global_batch_size -1 --validation.steps -1", {}),
    ("--training.global_batch_size 64", {"batch.global": 64}),
    ("--quick-geglu --glu-linear-offset 1.0 --softmax-type learnable", {"model.attention_sinks": True}),
])  # fmt: skip
def test_values_of_flags_together(words: str, settings: dict[str, Any]) -> None:
    assert repr(written(words)) == repr(settings)


@pytest.mark.parametrize(("words", "hint"), [
    ("--outer-dp-sharding-strategy optim", 'for optim write parallel.state_shard = "all" with zero = 3, no '
     "parallel.dp_shard with zero = 1 or 2: for memory alone"),
    ("--expert-tensor-parallel-size 1", "nothing to write: an expert is whole"),
    ("--expert-tensor-parallel-size 2", "not supported: an expert is whole on a rank, of parallel.ep"),
    ("--moe-layer-freq 1", "nothing to write: all layers have experts"),
    ("--moe-layer-freq ([0]*3+[1]*58)", "write model.dense_layers=3 (the first layers without experts, "
     "N of `([0]*N+[1]*M)`)"),
    ("--moe-layer-freq 2", "not supported: only model.dense_layers first layers lack experts"),
    ("--moe-router-load-balancing-type none", "write moe.balance=none"),
    ("--moe-router-load-balancing-type seq_aux_loss", "write moe.balance=sequence"),
    ("--moe-router-load-balancing-type aux_loss", "write moe.balance=group (with moe.balance_group = batch.micro)"),
    ("--moe-router-load-balancing-type sinkhorn",
     "not supported: write another moe.balance, or model.balance_bias = true"),
    ("--moe-router-load-balancing-type aux_loss seq_aux_loss",
     "write moe.balance=... (one loss: several are not supported)"),
    ("--moe-layer-recompute", "write train.recompute=full (of whole blocks, with attention)"),
    ("--moe-upcycling-granularity 2",
     "not in training: `megascale ckpt convert --experts N K` makes a checkpoint of experts"),
    ("--delay-wgrad-compute", "write parallel.schedule = interleaved_zb or dualpipev: both split backward"),
])  # fmt: skip
def test_flags_of_experts(words: str, hint: str) -> None:
    ((_, found),) = translate_all(read_flags(words.split()))
    assert found is not None and found.hint(command_line=True) == hint


def hints(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path), overrides)
    return [problem.hint for problem in caught.value.problems]


@pytest.mark.parametrize(("override", "hint"), [
    ("parallel.tensor_model_parallel_size=4", "write parallel.tp=4"),
    ("tensor-model-parallel-size=4", "write parallel.tp=4"),
    ("optimizer.lr_decay_iters=1000", "write optimizer.schedule_steps=1000"),
    ("model.hidden_dim=128", "write model.ffn_size=128"),
    ("model.query_pre_attn_scalar=-5", "write model.softmax_scale=... (its inverse square root)"),
    ("observe.tensorboard_dir=/x", "write observe.tensorboard=true"),
    ("optimizer.adam_beta2=0.98", "write 'optimizer.betas=[0.9, 0.98]'"),
    ("train.fp16=true", "write train.precision=bf16"),
    ("parallel.expert_model_parallel_size=8", "write parallel.ep=8"),
    ("model.num_local_experts=8", "write model.experts=8"),
    ("model.num_experts_per_tok=2", "write model.experts_per_token=2"),
    ("model.norm_topk_prob=false", "write model.router_normalize=false"),
    ("model.router_aux_loss_coef=0.01", "write moe.balance_weight=0.01 (with moe.balance)"),
    ("model.n_shared_experts=1", "write model.shared_ffn_size: n_shared_experts x moe_intermediate_size"),
    ("training.seq_len=2048", "write model.seq_length = 2048"),
    ("parallel.zero_stage=2", "write parallel.zero=2"),
    ("train.max_steps=7", "write train.steps=7"),
])  # fmt: skip
def test_a_name_of_another_system_as_a_setting(tmp_path: Path, override: str, hint: str) -> None:
    (found,) = hints(tmp_path, GOOD, override)
    assert found.startswith(hint)


def test_a_table_of_another_system(tmp_path: Path) -> None:
    """torchtitan's file: every key of its table with the one here."""
    table = '[parallelism]\ntensor_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\n'
    (found,) = hints(tmp_path, GOOD + table)
    assert found == 'write parallel.tp = 2, parallel.schedule = "interleaved_1f1b"'


@pytest.mark.parametrize(("table", "hint"), [
    ('[job]\ndump_folder = "x"\n', 'write output_dir = "x"'),
    ("[modle]\nnum_layers = 4\n", "did you mean 'model'?"),
])  # fmt: skip
def test_a_table_without_one_here(tmp_path: Path, table: str, hint: str) -> None:
    assert hints(tmp_path, GOOD + table) == [hint]


def test_a_list_has_the_values_up_to_the_next_flag() -> None:
    flags = read_flags(["--rampup-batch-size", "16", "8", "300000", "--lr", "-1e-4", "--swiglu", "--foo=3"])
    assert flags == {"--rampup-batch-size": [16, 8, 300000], "--lr": [-1e-4], "--swiglu": [], "--foo": [3]}
    assert find("--rampup-batch-size")[1].takes == MANY  # type: ignore[index]
