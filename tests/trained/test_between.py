"""What happened between checkpoints, against brute force."""

import copy
import gc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F
from weighted_loops import Apply

import epk_gp as epk
from checkpoint_runs import trained
from epk_gp.trained import between as between_module


class Attention(nn.Module):
    def __init__(self, width: int, n_head: int) -> None:
        super().__init__()
        self.n_head, self.c_attn, self.c_proj = n_head, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        n, T, width = x.shape
        q, k, v = (part.view(n, T, self.n_head, -1).transpose(1, 2) for part in self.c_attn(x).split(width, dim=2))
        z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(z.transpose(1, 2).reshape(n, T, width))


class Reader(nn.Module):
    def __init__(self, words: int = 7, width: int = 8, n_head: int = 2) -> None:
        super().__init__()
        self.embed, self.norm, self.attn = nn.Embedding(words, width), nn.LayerNorm(width), Attention(width, n_head)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        z = self.embed(x)
        return self.head(F.gelu(z + self.attn(self.norm(z))))[:, -1]


@pytest.fixture(scope="module")
def texts():
    torch.manual_seed(0)
    net, X = Reader().double(), torch.randint(7, (9, 5))
    return net, trained(net, X, torch.randint(7, (9,))), X


def outputs_at(net, state, X):
    net = copy.deepcopy(net)
    net.load_state_dict(state)
    return net.eval()(X).detach()


@pytest.mark.parametrize("name", ["rows", "texts"])
def test_shares_add_up_to_the_change_in_every_stretch(name, request):
    net, states, X, *_ = request.getfixturevalue(name)
    split = epk.between(net, states, X[:5])
    assert split.certified
    z = torch.stack([outputs_at(net, state, X[:5]) for state in states], dim=2)
    torch.testing.assert_close(split.by_stretch().values, z.diff(dim=2), rtol=0, atol=1e-12)
    torch.testing.assert_close(split.network, z[..., -1], rtol=0, atol=1e-12)
    both = split.by("module", "stretch")
    torch.testing.assert_close(both.values.sum(dim=2), split.by_stretch().values, rtol=0, atol=1e-12)
    torch.testing.assert_close(both.values.sum(dim=3), split.by_module().values, rtol=0, atol=1e-12)


def test_a_network_without_averages_is_integrated_along_lines():
    """Weights that are used by a function that is not linear in them: shares are line integrals of the gradient."""

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.ones(3, 2).double()), nn.Parameter(torch.zeros(2).double())

        def forward(self, x):
            return torch.tanh(x @ (self.w**2) + self.b)

    net, X = Squared(), torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    ends = [{"w": torch.full((3, 2), a).double(), "b": torch.full((2,), 1 - a).double()} for a in (0.3, 0.9)]
    split = epk.between(net, ends, X)
    t, weights = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(40))
    expected = torch.zeros(4, 2, 2, dtype=torch.float64)
    for node, weight in zip((1 + t) / 2, weights / 2, strict=True):
        here = {name: (ends[0][name].lerp(ends[1][name], node)).requires_grad_() for name in ("w", "b")}
        for n in range(4):
            for c in range(2):
                z = torch.tanh(X[n] @ (here["w"] ** 2) + here["b"])[c]
                for g, gradient in enumerate(torch.autograd.grad(z, list(here.values()))):
                    d = ends[1][("w", "b")[g]] - ends[0][("w", "b")[g]]
                    expected[n, c, g] += weight * (gradient * d).sum()
    torch.testing.assert_close(split.by("parameter").values, expected, rtol=0, atol=1e-10)
    assert split.certified


def overwrite(hidden):
    """Write halves to one tensor, which is then changed in place."""
    z = torch.empty(hidden.shape, dtype=hidden.dtype)
    z[:, :3], z[:, 3:] = hidden[:, :3].tanh(), hidden[:, 3:].sigmoid()
    return z.mul_(2)


def test_where_averages_of_operations_miss_the_change_it_says_so_and_goes_along_straight_lines(rows):
    _, _, X, y = rows
    net = nn.Sequential(nn.Linear(4, 6), Apply(overwrite), nn.Linear(6, 3)).double()
    states = trained(net, X, y)
    with pytest.warns(UserWarning, match="computed once more, along straight lines"):
        split = epk.between(net, states, X[:5])
    assert split.certified
    assert split.path == "straight steps"
    change = outputs_at(net, states[-1], X[:5]) - outputs_at(net, states[0], X[:5])
    torch.testing.assert_close(split.pieces.sum(dim=(2, 3)), change, rtol=0, atol=1e-10)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("none is left"), RuntimeError("DefaultCPUAllocator: none")])
def test_an_error_of_the_trial_that_says_nothing_of_the_network_reaches_the_user(error, rows, monkeypatch):
    def fails(*_, **__):
        raise error

    net, states, X, _ = rows
    monkeypatch.setattr(between_module, "observed_plan", fails)
    with pytest.raises(type(error), match=str(error)):
        epk.between(net, states, X[:5])


def moved(net, size=1e-7):
    torch.manual_seed(5)
    states = [copy.deepcopy(net.state_dict()) for _ in range(2)]
    for name, p in net.named_parameters():
        states[1][name] = p.detach() + size * torch.randn_like(p)
    return states


def gradients(net, z):
    named = dict(net.named_parameters())
    found = torch.autograd.grad(z, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, found, strict=True))


def test_samples_are_first_order_shares(rows):
    """A sample's share is -lr c_i <averaged gradient, its gradient at the beginning>; it is never certified."""
    net, _, X, y = rows
    asked, states = X[:3], moved(net)
    split = epk.between(net, states, asked, data=(X, y), lr=torch.tensor([0.3]).double(), head="logits")
    assert not split.certified
    assert "first order" in str(split)
    change = split.by_stretch().values
    torch.testing.assert_close(split.explained + split.unexplained, change, rtol=0, atol=1e-12)
    torch.testing.assert_close(split.explained.squeeze(2), split.samples.sum(dim=2), rtol=0, atol=1e-12)
    net.eval()
    losses = [gradients(net, F.cross_entropy(net(X[i : i + 1]), y[i : i + 1])) for i in range(len(X))]
    for n in range(3):
        for c in range(3):
            own = gradients(net, net(asked)[n, c])
            shares = [-0.3 / len(X) * sum((own[k] * g[k]).sum() for k in own) for g in losses]
            torch.testing.assert_close(split.samples[n, c], torch.stack(shares), rtol=1e-5, atol=1e-9)


def test_heads_are_slices_of_queries_keys_values_and_output(texts):
    """A head's share is that of its rows of the three projections and its columns of the fourth."""
    net, _, X = texts
    states = moved(net)
    given = {"attn": {"c_attn.weight": (3, 2), "c_attn.bias": (3, 2), "c_proj.weight": (8, 2)}}
    shares = epk.between(net, states, X[:2], heads=given).by_head()
    places = [shares.axes[0].names.index(f"attn head {h}") for h in range(2)]
    size, width = 4, 8
    for n in range(2):
        own = gradients(net, net(X)[n, 3])
        d = {name: (states[1][name] - states[0][name]) * own[name] for name in own}
        for h, place in enumerate(places):
            rows = [slice(part * width + h * size, part * width + (h + 1) * size) for part in range(3)]
            expected = sum(d["attn.c_attn.weight"][r].sum() + d["attn.c_attn.bias"][r].sum() for r in rows)
            expected = expected + d["attn.c_proj.weight"][:, h * size : (h + 1) * size].sum()
            torch.testing.assert_close(shares.values[n, 3, place], expected, rtol=1e-4, atol=1e-12)
    whole = epk.between(net, states, X[:2]).by_module()
    torch.testing.assert_close(shares.values.sum(dim=2), whole.values.sum(dim=2), rtol=0, atol=1e-12)


def test_heads_are_given_and_never_guessed(texts):
    net, states, X = texts
    split = epk.between(net, states, X[:2])
    with pytest.raises(ValueError, match=r"heads must be given, .*: got none. Pass between\(..., heads="):
        split.by_head()
    with pytest.raises(ValueError, match="heads must divide a trained parameter"):
        epk.between(net, states, X, heads={"attn": {"c_attn.weight": (3, 5)}})
    with pytest.raises(ValueError, match="'attn.qkv.weight' into .*, got no such parameter"):
        epk.between(net, states, X, heads={"attn": {"qkv.weight": (3, 2)}})
    with pytest.raises(ValueError, match="axes must be different ones of"):
        split.by("layer")


def test_numbers_of_a_text_are_split_as_outputs_are(texts):
    net, states, X = texts
    split = epk.between(net, states, X, function=epk.RowFunction.logit_difference(2, 5))
    z = [outputs_at(net, state, X) for state in (states[0], states[-1])]
    expected = (z[1] - z[0])[:, 2] - (z[1] - z[0])[:, 5]
    torch.testing.assert_close(split.by_module().values.sum(dim=2)[:, 0], expected, rtol=0, atol=1e-12)


def test_the_head_is_that_of_the_loss_of_the_data_or_what_is_asked_for(rows):
    net, states, X, y = rows
    z = outputs_at(net, states[-1], X[:3])
    log_p = torch.log_softmax(z, dim=1)
    heads = {None: z, "logits": z, "log_softmax": log_p}
    for head, expected in heads.items():
        torch.testing.assert_close(epk.between(net, states, X[:3], head=head).network, expected)
    data = {"data": (X, y), "lr": 0.1}
    torch.testing.assert_close(epk.between(net, states, X[:3], **data).network, log_p)
    torch.testing.assert_close(epk.between(net, states, X[:3], head="logits", **data).network, z)


def test_outputs_are_computed_some_at_a_time_where_memory_is_small():
    """The budget changes the order of the work alone: here the gradients of all outputs of a text take 9 MB."""
    torch.manual_seed(0)
    net, X = Reader(words=100, width=32).double(), torch.randint(100, (3, 5))
    states = moved(net, 0.1)
    whole, small = epk.between(net, states, X), epk.between(net, states, X, memory_budget=1 << 20)
    torch.testing.assert_close(small.pieces, whole.pieces, rtol=0, atol=1e-12)
    one = epk.between(net, states, X, classes=torch.tensor([4, 0, 99]), memory_budget=1 << 20)
    expected = whole.pieces[torch.arange(3), torch.tensor([4, 0, 99])]
    torch.testing.assert_close(one.pieces[:, 0], expected, rtol=0, atol=1e-12)


def test_checkpoints_are_read_as_others_write_them(rows, tmp_path: Path):
    net, states, X, _ = rows
    expected = epk.between(net, states, X[:2]).pieces
    folder = tmp_path / "lightning" / "checkpoints"
    folder.mkdir(parents=True)
    for k, state in enumerate(states):
        torch.save(
            {"state_dict": {f"net.{n}": v for n, v in state.items()}, "epoch": k},
            folder / f"epoch={k}-step={9 * k}.ckpt",
        )
        (tmp_path / f"checkpoint-{9 * k}").mkdir()
        save_file(state, tmp_path / f"checkpoint-{9 * k}" / "model.safetensors")
        torch.save({f"module._orig_mod.{n}": v for n, v in state.items()}, tmp_path / f"{k}.pt")
    ways = [
        folder.parent,
        [tmp_path / f"checkpoint-{9 * k}" for k in range(4)],
        [tmp_path / f"{k}.pt" for k in range(4)],
        [states[0], tmp_path / "1.pt", tmp_path / "checkpoint-18", states[3]],
    ]
    for way in ways:
        split = epk.between(net, way, X[:2])
        assert torch.equal(split.pieces, expected)
    given = epk.between(net, [tmp_path / f"checkpoint-{n}" for n in (0, 27, 9)], X[:2])  # a list is in its own order
    assert torch.equal(given.pieces, epk.between(net, [states[k] for k in (0, 3, 1)], X[:2]).pieces)


def test_a_parameter_that_the_network_has_twice_may_be_stored_once(tmp_path: Path):
    """Tied weights are one parameter, under either name; its share counts both uses."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.out(torch.tanh(self.embed(x)).mean(dim=1))

    torch.manual_seed(0)
    net, X = Tied().double(), torch.randint(6, (3, 4))
    ends = [{"out.weight": net.embed.weight.detach() * factor} for factor in (1.0, 1.5)]
    split = epk.between(net, ends, X)
    assert split.names == (("embed.weight", "embed", ""),)
    assert split.certified


FAULTS = {
    "must have all parameters and buffers of the network: '0.weight' is missing": {"0.weight": None},
    "must have all parameters and buffers of the network: '1.running_var' is missing": {"1.running_var": None},
    "must be of this network, which has no '4.bias': it is left over, one of 2": {
        "4.weight": torch.ones(3, 3), "4.bias": torch.ones(3),
    },
    r"must have tensors of the network's shapes: '3.bias' has \(2,\)": {"3.bias": torch.zeros(2).double()},
    "must have the dtype of the network: '3.bias' has torch.float32": {"3.bias": torch.zeros(3)},
    "must hold finite numbers: '3.bias' has NaN": {"3.bias": torch.full((3,), torch.nan).double()},
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_a_wrong_checkpoint_is_refused_in_one_line(message, rows):
    net, states, X, _ = rows
    faulty = {name: value for name, value in {**states[2], **FAULTS[message]}.items() if value is not None}
    with pytest.raises(ValueError, match=f"'state 2' {message}"):
        epk.between(net, [*states[:2], faulty, states[3]], X)


def test_a_checkpoint_of_two_networks_is_not_guessed_about(rows):
    """Weights and their average under other names, whatever they share: which is meant must be said."""
    net, states, X, _ = rows
    both = [{f"{k}.{n}": v + (k + n == "ema3.weight") for k in ("ema", "model") for n, v in s.items()} for s in states]
    with pytest.raises(ValueError, match="'state 0' must hold one network: it has 2 with all of these parameters"):
        epk.between(net, both, X)


def test_stretches_stay_apart_whatever_their_names(rows, tmp_path: Path):
    net, states, X, _ = rows
    for k, state in enumerate(states):
        (tmp_path / f"v1.{k}").mkdir()
        save_file(state, tmp_path / f"v1.{k}" / "model.safetensors")
    folders = [tmp_path / f"v1.{k}" for k in range(4)]
    files = epk.between(net, [folder / "model.safetensors" for folder in folders], X[:2])
    assert files.by_stretch().values.shape == (2, 3, 3)
    assert len(set(files.checkpoints)) == 4
    assert epk.between(net, folders, X[:2]).checkpoints == ("v1.0", "v1.1", "v1.2", "v1.3")
    twice = epk.between(net, [states[0], states[0], states[1]], X[:2])
    assert torch.count_nonzero(twice.by_stretch().values[:, :, 0]) == 0


def test_buffers_are_those_of_the_checkpoints(rows):
    """Statistics that some of them have not, and masks that change, are refused."""
    net, states, X, _ = rows
    states = [copy.deepcopy(state) for state in states]
    without = [{name: v for name, v in state.items() if "running" not in name} for state in states]
    for odd in (0, 2):
        mixed = [without[k] if k == odd else state for k, state in enumerate(states)]
        with pytest.raises(ValueError, match="'1.running_mean' is missing"):
            epk.between(net, mixed, X)
    with pytest.raises(ValueError, match="'1.running_mean' is missing"):
        epk.between(net, without, X)
    masked = copy.deepcopy(net)
    masked.register_buffer("mask", torch.tensor([True, False]))
    for k, state in enumerate(states):
        state["mask"] = torch.tensor([True, k == 3])
    with pytest.raises(ValueError, match="buffers of whole numbers must be the same in all checkpoints: 'mask'"):
        epk.between(masked, states, X)


def test_shared_weights_of_two_values_are_refused(rows):
    X = rows[2]
    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    shared[2].weight = shared[0].weight
    state = shared.state_dict()
    odd = {**state, "2.weight": state["2.weight"] + 1}
    with pytest.raises(ValueError, match="one value of weights that the network shares: '0.weight' and '2.weight'"):
        epk.between(shared, [state, odd], X)


def test_a_mask_of_signs_is_integrated_along_lines(rows):
    """A network that makes numbers of comparisons has no averages of operations; the sum stays exact."""
    net = nn.Sequential(nn.Linear(4, 6), Apply(lambda z: z * (z > 0).to(z.dtype)), nn.Linear(6, 2)).double()
    split = epk.between(net, moved(net, 0.3), rows[2][:4])
    assert split.certified
    assert "averaged" not in split.path


def test_memory_does_not_grow_with_the_stretches(texts):
    net, states, X = texts
    path, held = [states[k % 4] for k in range(9)], list[int]()
    at_each = between_module.layerwise_average

    def counted(*args):
        held.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
        return at_each(*args)

    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(between_module, "layerwise_average", counted)
            epk.between(net, path, X)
    finally:
        gc.enable()
    assert held[-1] <= held[2] + 5


def test_a_function_needs_no_outputs():
    torch.manual_seed(0)
    net, X = nn.Sequential(nn.Embedding(7, 8), nn.GELU(), nn.Linear(8, 7)).double(), torch.randint(7, (3, 5))
    split = epk.between(net, moved(net, 0.1), X, function=epk.RowFunction.log_probability(torch.randint(7, (3,))))
    assert split.certified
    assert split.network.shape == (3, 1)


@pytest.mark.parametrize("saved", [None, ["head"]])
def test_adapters_of_peft_are_read(saved, tmp_path: Path):
    """Its folders hold the adapter alone, without its name; the frozen base is the network's own."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base, X = Reader(), torch.randint(7, (3, 5))
    net = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=saved))
    whole = list[dict[str, torch.Tensor]]()
    for k in range(3):
        net.save_pretrained(tmp_path / f"checkpoint-{k}")
        whole.append(copy.deepcopy(net.state_dict()))
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * torch.randn_like(p) * p.requires_grad)
    split = epk.between(net, tmp_path, X)
    assert split.certified
    assert all("lora" in parameter or "modules_to_save" in parameter for parameter, *_ in split.names)
    assert torch.equal(epk.between(net, whole, X).pieces, split.pieces)
    trained_alone = [{n: state[n] for n, p in net.named_parameters() if p.requires_grad} for state in whole]
    with pytest.raises(ValueError, match="is missing"):  # not of PEFT's form: nothing says that a base belongs to it
        epk.between(net, trained_alone, X)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_folders_of_lightning_and_transformers_are_read(tmp_path: Path):
    lightning = pytest.importorskip("pytorch_lightning")
    transformers = pytest.importorskip("transformers")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

        def training_step(self, batch, _):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 0.01)

    torch.manual_seed(0)
    module, X = Module(), torch.randn(16, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, torch.randint(3, (16,))), batch_size=8)
    saves = lightning.callbacks.ModelCheckpoint(tmp_path / "a" / "checkpoints", every_n_train_steps=3, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    lightning.Trainer(max_steps=12, callbacks=[saves], default_root_dir=tmp_path, **quiet).fit(module, loader)
    split = epk.between(module.net, tmp_path / "a", X[:3])
    assert split.certified
    assert [name.partition("step=")[2] for name in split.checkpoints] == ["3", "6", "9", "12"]
    torch.testing.assert_close(split.network, module.net(X[:3]).detach())

    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, num_labels=2, **sizes)
    net, texts = transformers.BertForSequenceClassification(config), torch.randint(1, 20, (8, 6))
    data = [{"input_ids": text, "labels": int(text[0]) % 2} for text in texts]
    settings = {"max_steps": 12, "save_steps": 4, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(str(tmp_path / "b"), **settings)
    transformers.Trainer(net, arguments, train_dataset=data).train()
    heads = {"bert.encoder.layer.0.attention": {"self.query.weight": (1, 2), "output.dense.weight": (8, 2)}}
    asked = {"output": lambda returned: returned.logits, "heads": heads}
    split = epk.between(net, tmp_path / "b", {"input_ids": texts[:3]}, **asked)
    assert split.checkpoints == ("checkpoint-4", "checkpoint-8", "checkpoint-12")
    assert split.certified
    assert "bert.encoder.layer.0.attention head 1" in split.by_head().axes[0].names


def test_wrong_arguments_are_refused(rows, tmp_path: Path):
    net, states, X, y = rows
    frozen = copy.deepcopy(net)
    frozen[0].requires_grad_(False)
    (tmp_path / "odd.pt").write_bytes(b"no checkpoint")
    calls = {
        "frozen parameters and buffers of whole numbers must be the same": lambda: epk.between(frozen, states, X),
        "at least two checkpoints": lambda: epk.between(net, states[:1], X),
        "loss and lr must come with the training samples": lambda: epk.between(net, states, X, lr=0.1),
        "lr must be given with data": lambda: epk.between(net, states, X, data=(X, y)),
        "one for each of the 3 stretches: got 2": lambda: epk.between(net, states, X, data=(X, y), lr=(0.1, 0.2)),
        "lr must be positive and finite: got nan": lambda: epk.between(net, states, X, data=(X, y), lr=float("nan")),
        "must be copies": lambda: epk.between(net, [net.state_dict(), net.state_dict()], X),
        "odd.pt must hold": lambda: epk.between(net, [states[0], tmp_path / "odd.pt"], X),
    }
    for message, call in calls.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(FileNotFoundError, match="a checkpoint must exist"):
        epk.between(net, [states[0], tmp_path / "none.pt"], X)
    with pytest.raises(TypeError, match="checkpoints must be a sequence"):
        epk.between(net, states[0], X)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module: got str"):
        epk.between("net", states, X)
    for heads in ({"0": {"weight": 2}}, {"0": (1, 2)}, "auto"):
        with pytest.raises(TypeError, match=r"heads must be \{module: \{parameter"):
            epk.between(net, states, X, heads=heads)
    with pytest.raises(TypeError, match="heads, a number of 'weight', must be a whole number: got True"):
        epk.between(net, states, X, heads={"0": {"weight": (True, 2)}})
    with pytest.raises(TypeError, match="a checkpoint must be a state dict"):
        epk.between(net, [1, 2], X)
