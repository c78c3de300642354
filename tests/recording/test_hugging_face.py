"""`transformers.Trainer` as it is used: padding, language models, smoothing, LoRA, the best model."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.callbacks import HuggingFaceRecorderCallback, IndexedDataset
from loops import assert_exact as assert_terms_are_exact
from recipes.path_reference import brute_force_terms
from recipes.problem import C, finish
from recipes.reference import Watched, flatten, step_terms

transformers = pytest.importorskip("transformers", reason="needs the extra 'huggingface'")
peft = pytest.importorskip("peft", reason="needs the extra 'recipes'")
pytestmark = [
    pytest.mark.filterwarnings("default:::transformers", "default:::accelerate", "default::DeprecationWarning"),
    pytest.mark.filterwarnings("default:::peft", "default::FutureWarning"),
]

M, LENGTH, VOCABULARY = 12, 6, 9
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": 8, "hidden_size": 4, "intermediate_size": 6}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2}


class WatchedTrainer(Watched):
    """The brute force beside a real recorder; it watches the logits, of which the model computes its own loss."""

    inner_class = epk.Recorder

    def __init__(self, net, optimizer, X, y, **options):
        super().__init__(net, optimizer, X, y, **options)
        self.optimizers = [optimizer.optimizer]  # Accelerate's wrapper has no hooks of its own

    def _after_forward(self, net, args, returned):
        if torch.is_grad_enabled():
            watched = self.passes[-1]
            place = next(k for k, z in enumerate(flatten(returned)[0]) if z is returned.logits)
            returned.logits.register_hook(lambda g: self._collect(watched, place, g))


def sentences(side="right", *, is_labelled=True):
    """Padded inputs and labels, and the items as a tokenizer leaves them, without padding."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(1, VOCABULARY - 2, (2 + k % (LENGTH - 1),), generator=generator) for k in range(M)]

    def padded(values, filler):
        return torch.stack([_pad(v, LENGTH, filler, side) for v in values])

    X = {"input_ids": padded(rows, 0), "attention_mask": padded([torch.ones_like(row) for row in rows], 0)}
    items = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in rows]
    if is_labelled:
        return X, torch.arange(M) % C, [item | {"labels": k % C} for k, item in enumerate(items)]
    return X, epk.next_words(padded(rows, -100)), items


def _pad(values, length, filler, side):
    rest = values.new_full((length - len(values),), filler)
    return torch.cat([values, rest] if side == "right" else [rest, values])


def collator(side="right", multiple=1):
    """Pads a batch to its own longest row, as `DataCollatorWithPadding` does."""

    def collate(items):
        longest = max(len(item["input_ids"]) for item in items)
        length = math.ceil(longest / multiple) * multiple
        batch = {
            key: torch.stack([_pad(torch.tensor(item[key]), length, 0, side) for item in items])
            for key in ("input_ids", "attention_mask")
        }
        return batch | {key: torch.tensor([item[key] for item in items]) for key in ("labels", "index")}

    return collate


def for_language_models(side="right", *, mlm=False):
    """The library's own collator; with `mlm` it masks tokens at random."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[PAD]": 0, "[MASK]": 8, "[UNK]": 7} | {f"w{k}": k for k in range(1, 7)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]", mask_token="[MASK]", unk_token="[UNK]", padding_side=side,
    )  # fmt: skip
    return transformers.DataCollatorForLanguageModeling(tokenizer, mlm=mlm, mlm_probability=0.4, seed=1)


def bert(**options):
    config = transformers.BertConfig(**SIZES, **LAYERS, num_labels=C, pad_token_id=0, **options)
    return transformers.BertForSequenceClassification(config).double()


def masked_bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, **LAYERS, pad_token_id=0)).double()


def gpt2():
    sizes = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 4, "n_layer": 1, "n_head": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens)).double()


LLAMA = {**SIZES, **LAYERS, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def wide_llama():
    """In float64 all through: the library's normalisations compute in float32."""
    net = llama().double()
    for module in [*net.modules()]:
        for name, part in module.named_children():
            if isinstance(part, transformers.models.llama.modeling_llama.LlamaRMSNorm):
                setattr(module, name, nn.RMSNorm(part.weight.shape, eps=part.variance_epsilon).double())
    return net


def mixtral():
    experts = {"num_local_experts": 4, "output_router_logits": True, "experts_implementation": "eager"}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, **experts))


def next_word_loss(outputs, labels, num_items_in_batch=None):
    """The loss of causal language models in the model's own dtype, for the trainer's `compute_loss_func`."""
    targets = epk.next_words(labels)
    total = F.cross_entropy(outputs.logits.mT, targets, reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def with_lora(model, modules, kind, **options):
    config = peft.LoraConfig(r=2, target_modules=modules, lora_dropout=0.1, task_type=kind, **options)
    return peft.get_peft_model(model, config)


def logits(returned):
    return returned.logits


first, last = ((lambda returned, k=k: returned.logits[:, k]) for k in (0, -1))


def flat(items):
    """Put all texts into one row, as for attention without padding."""
    texts = [{key: item[key] for key in ("input_ids", "labels") if key in item} for item in items]
    return transformers.DataCollatorWithFlattening()(texts) | {"index": torch.tensor([i["index"] for i in items])}


def train(folder, model, items, collate, callback, *, trainer=None, **arguments):
    arguments = {"per_device_train_batch_size": 4, "num_train_epochs": 1, "save_strategy": "no"} | arguments
    arguments = {"logging_strategy": "no", "remove_unused_columns": False, "output_dir": str(folder)} | arguments
    arguments |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "learning_rate": 0.02, "seed": 1}
    options = {"train_dataset": IndexedDataset(items, key="index"), "callbacks": [callback], "data_collator": collate}
    transformers.Trainer(model, transformers.TrainingArguments(**arguments), **options, **(trainer or {})).train()


def fit(monkeypatch, folder, model, data, collate, *, loss=None, output=logits, **arguments):
    """Train with a watched recorder; `loss` None is the default, and "unstated" is none."""
    monkeypatch.setattr("epk_gp.recording.huggingface.Recorder", WatchedTrainer)
    X, y, items = data
    options = {} if loss is None else {"loss": None}
    unexplained = {"unexplained": 0.05} if arguments.get("bf16") else {}
    options |= {} if output is None else {"output": output}
    callback = HuggingFaceRecorderCallback(X, None if loss else y, **options, **unexplained)
    train(folder, model, items, collate, callback, **arguments)
    X_test = {name: value[:2] for name, value in X.items()}
    return finish(callback._recorder, model, X_test, X, torch.zeros(M), output or last)


def assert_exact(result, *, has_brute_force=True, tolerance=1e-10):
    parts = assert_terms_are_exact(result.trajectory, result.X_test, tolerance=tolerance)
    assert float((parts.total - result.outputs).abs().max()) < tolerance
    if not has_brute_force:
        return
    expected = brute_force_terms(result)
    assert all(step_terms(result.recorder, step)[1] < 1e-12 for step in result.recorder.steps)
    scale = expected.samples.norm()
    assert float((parts.samples - expected.samples).norm()) < 1e-8 * scale
    assert float((parts.decay - expected.decay).norm()) < 1e-8 * scale


ACCUMULATED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.05}
CLASSIFIERS = {
    "right": (bert, "right", {}),
    "left": (bert, "left", ACCUMULATED),
    "wider_than_X": (bert, "multiple", {"num_train_epochs": 2}),
    "by_length": (bert, "right", {"train_sampling_strategy": "group_by_length", "gradient_checkpointing": True}),
    "adafactor": (bert, "right", {"optim": "adafactor", "weight_decay": 0.1}),
    "lora": (lambda: with_lora(bert(), ["query", "value"], "SEQ_CLS"), "right", {"num_train_epochs": 2}),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("make", "padding", "arguments"), CLASSIFIERS.values(), ids=CLASSIFIERS)
def test_a_classifier_on_batches_padded_to_their_longest_row_is_exact(monkeypatch, tmp_path, make, padding, arguments):
    data = sentences("left" if padding == "left" else "right")
    collate = collator(multiple=4) if padding == "multiple" else collator(padding)
    result = fit(monkeypatch, tmp_path, make(), data, collate, **arguments)
    widths = {p.inputs.values.shape[1] for s in result.recorder.inner.steps for p in s.passes if p.inputs is not None}
    assert widths - {2 * LENGTH}
    assert_exact(result)
    assert result.trajectory.model.num_weights == sum(p.numel() for p in result.net.parameters() if p.requires_grad)


INSIDE = {"loss": "unstated", "output": last}  # models that compute their loss, in float32 whatever their weights are
STATED = {"output": None, "trainer": {"compute_loss_func": next_word_loss}}
LANGUAGE_MODELS = {
    "right": (gpt2, "right", INSIDE | {"gradient_accumulation_steps": 2}),
    "left": (gpt2, "left", INSIDE | ACCUMULATED),
    "lora": (lambda: with_lora(gpt2(), ["c_attn"], "CAUSAL_LM", fan_in_fan_out=True), "right", INSIDE),
    "stated": (gpt2, "right", STATED | {"per_device_train_batch_size": 5, "gradient_accumulation_steps": 2}),
    "stated_llama_left": (wide_llama, "left",
        STATED | {"gradient_accumulation_steps": 3, "average_tokens_across_devices": False}),
}  # fmt: skip


def quick(*names, table):
    """The names of a table, of which all but these are slow."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.slow) for name in table]


@pytest.mark.parametrize("name", quick("right", "stated", table=LANGUAGE_MODELS))
def test_a_language_model_is_exact_and_a_stated_loss_gives_all_tokens_of_a_step_one_weight(monkeypatch, tmp_path, name):
    """The trainer divides by the tokens of all batches of a step, of GPT-2's by their first ones too."""
    make, side, options = LANGUAGE_MODELS[name]
    data = sentences(side, is_labelled=False)
    result = fit(monkeypatch, tmp_path, make(), data, for_language_models(side), **options)
    assert_exact(result)
    if "stated" in name:
        run = result.trajectory
        assert run.loss == epk.CrossEntropy()
        assert all(float(step.sample_weights.std()) < 1e-12 * step.sample_weights[0] for step in run.steps)


def prompted(items):
    """The loss leaves out the first two words, as in fine-tuning on answers."""
    batch = for_language_models()(items)
    batch["labels"][:, :2] = -100
    return batch


TWO = {"gradient_accumulation_steps": 2}
SMOOTHED = TWO | {"label_smoothing_factor": 0.1}
IN_FLOAT32 = {
    "prompted": (gpt2, "right", {"output": None, "gradient_checkpointing": True}),
    "prompted_llama": (llama, "right", {"output": None} | TWO),
    "noise": (llama, "right", {"output": None, "neftune_noise_alpha": 5.0}),
    # The trainer divides by the labels of all batches of a step; batches and recorded labels have other widths.
    "factor": (gpt2, "right", {"output": last} | TWO),
    "factor_left": (gpt2, "left", {"output": last} | SMOOTHED),
    "factor_llama_left": (llama, "left", {"output": last} | SMOOTHED),
}


@pytest.mark.parametrize("name", quick("prompted", "factor", table=IN_FLOAT32))
def test_what_the_trainer_does_to_a_causal_model_and_to_its_loss_is_recorded(monkeypatch, tmp_path, name):
    (make, side, options), is_prompted = IN_FLOAT32[name], "prompted" in name
    collate = prompted if is_prompted else for_language_models(side)
    result = fit(monkeypatch, tmp_path, make().float(), sentences(side, is_labelled=False), collate, **options)
    assert_exact(result, has_brute_force=False, tolerance=1e-5)
    for seen in (seen for step in result.trajectory.steps for seen in step.passes if is_prompted):
        assert bool((seen.targets.values[:, 0] == -100).all())
        assert bool((seen.targets.values[:, 1:] != -100).any())


def test_tokens_that_are_masked_at_random_are_found(monkeypatch, tmp_path):
    (X, _, items), collate = sentences(is_labelled=False), for_language_models(mlm=True)
    data, options = (X, X["input_ids"], items), TWO | {"output": first}
    assert_exact(fit(monkeypatch, tmp_path, masked_bert(), data, collate, **options))


def test_label_smoothing_is_taken_from_the_trainer(monkeypatch, tmp_path):
    """In float64 the library rounds the smoothed part to float32: there the gradient in the outputs is recorded."""
    result = fit(monkeypatch, tmp_path, bert().float(), sentences(), collator(), label_smoothing_factor=0.1)
    assert result.trajectory.loss.label_smoothing == 0.1
    assert_exact(result, has_brute_force=False, tolerance=1e-5)
    with pytest.warns(UserWarning, match="rows do not follow the stated loss"):
        result = fit(monkeypatch, tmp_path, bert(), sentences(), collator(), label_smoothing_factor=0.1)
    assert_exact(result, has_brute_force=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("default::epk_gp.core.show.CertificateWarning")
def test_in_bf16_the_weights_of_accumulated_batches_are_read(monkeypatch, tmp_path):
    """The trainer leaves the division by their number to models that take it, and this one does not divide."""
    options = TWO | {"bf16": True, "optim": "sgd"}
    result = fit(monkeypatch, tmp_path, bert().float(), sentences(), collator(), **options)
    assert all(abs(float(step.sample_weights.sum()) - len(step.passes)) < 0.02 for step in result.trajectory.steps)


def test_a_trainer_that_was_refused_or_that_an_error_ended_trains_again_with_the_same_model(tmp_path):
    """As in a notebook, whose cell is mended and run again."""
    (X, y, items), model, collate = sentences(), bert(), collator()
    first, second = (HuggingFaceRecorderCallback(X, y) for _ in range(2))
    first.close()  # of what has not begun
    with pytest.raises(RuntimeError, match=r"training has not started. Call trainer.train"):
        _ = first.trajectory
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        train(tmp_path, model, items, collate, first, remove_unused_columns=True)
    without = lambda items: {key: value for key, value in collate(items).items() if key != "index"}  # noqa: E731
    with pytest.raises(ValueError, match="under 'index': got attention_mask, input_ids, labels.*Wrap the data in"):
        train(tmp_path, model, items, without, first)

    def interrupt(*_):
        raise KeyboardInterrupt

    for fails in (False, True, False):
        hook = model.register_forward_hook(interrupt) if fails else None
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
            train(tmp_path, model, items, collate, second)
        if fails:
            hook.remove()
        else:
            assert_terms_are_exact(second.trajectory, {name: value[:2] for name, value in X.items()})


@pytest.mark.slow
def test_the_best_model_is_loaded_after_the_run(monkeypatch, tmp_path):
    data, scores = sentences(), iter((3.0, 2.0, 1.0))
    result = fit(
        monkeypatch, tmp_path, bert(), data, collator(), num_train_epochs=3, eval_strategy="epoch",
        save_strategy="epoch", load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
        trainer={
            "eval_dataset": IndexedDataset(data[2][:4], key="index"),
            "compute_metrics": lambda _: {"score": next(scores)},
        },
    )  # fmt: skip
    run = result.trajectory
    with pytest.warns(UserWarning, match=r"Yours is that after step 3, which trajectory.until\(3\) explains"):
        assert epk.attribute(run, result.X_test).certified
    parts = epk.attribute(run.until(3), result.X_test, head="logits")
    assert (run.num_steps, parts.certified) == (9, True)
    assert float((parts.total - result.outputs).abs().max()) < 1e-10


def shuffled(items):
    batch = collator()(items)
    return batch | {"index": batch["index"].roll(1)}


def relabelled(items):
    batch = collator()(items)
    return batch | {"labels": (batch["labels"] + 1) % C}


FAULTS = {  # a router's loss mixes the rows of a batch
    "indices": (bert, shuffled, r"row 0 was X\[\d+\], the batch says"),
    "labels": (bert, relabelled, "agree with y at the announced indices no more than by chance"),
    "not_shifted": (gpt2, None, r"with the label of the next one.*pass epk_gp.next_words\(y\) as y"),
    "loss_of_a_router": (mixtral, None, r"does not come through the outputs of the announced rows"),
    "texts_in_one_row": (gpt2, flat, r"one row for each item: got 4 indices beside \[1\] rows"),
}


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(monkeypatch, tmp_path, name):
    make, collate, message = FAULTS[name]
    X, y, items = sentences(is_labelled=make is bert)
    if name == "not_shifted":
        y = X["input_ids"].masked_fill(X["attention_mask"] == 0, -100)
    options = {"output": logits if make is bert else last, "gradient_accumulation_steps": 2}
    with pytest.raises(ValueError, match=message):
        fit(monkeypatch, tmp_path, make().float(), (X, y, items), collate or for_language_models(), **options)
