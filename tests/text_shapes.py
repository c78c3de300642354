"""Texts and answers of all shapes, with numbers and shares from plain loops that share no code with the package.

A case draws a network (lengths that coincide, prefixes, classes second or last, inputs of several tensors, pixels), how
it was trained, and what is asked. `outcome` says what became of it.
"""

import copy
import random
import warnings
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk

# Rows of a training, texts that are asked about, width of networks, learning rate, and what losses leave out.
ROWS, TESTS, WIDTH, RATE, LEFT_OUT = 6, 2, 4, 0.03, -100
NODES = [(0.5 + float(t) / 2, float(w) / 2) for t, w in zip(*np.polynomial.legendre.leggauss(12), strict=True)]


@dataclass
class Returned:
    loss: Tensor | None
    logits: Tensor


@dataclass
class Case:
    seed: int
    inputs: str = "ids"  # or mask, types, vectors, pixels
    length: int = 5
    words: int = 7
    prefix: int = 0
    is_second: bool = False
    is_fixed: bool = False  # whether the network takes inputs of one length alone
    returns: str = "tensor"  # or logits, dictionary, tuple
    trained: str = "cross entropy"  # or no loss, own loss, label, checkpoints
    ignored: int = LEFT_OUT
    answers: str = "all"  # or last, word
    asked: str = "log_probability"  # or logit_difference, loss_value
    door: str = "attribute"  # or influence
    states_dim: bool = False

    @property
    def dim(self) -> int:
        return 1 if self.is_second else -1

    @property
    def may_be_refused(self) -> bool:
        """Whether neither loss nor network can say where it has its words: it takes inputs of one length."""
        return self.is_fixed and self.trained != "cross entropy"

    @property
    def is_ambiguous(self) -> bool:
        """Whether lengths do not say where the loss has its classes."""
        return self.words == (self.length if self.inputs == "pixels" else self.length + self.prefix)


class Net(nn.Module):
    """Words that see those before them, or pixels that see their neighbours."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, self.is_image = case, case.inputs == "pixels"
        places = (WIDTH, case.length, case.length) if self.is_image else (case.length + case.prefix, WIDTH)
        self.places = nn.Parameter(0.5 * torch.randn(places))
        self.first = nn.Parameter(torch.randn(case.prefix, WIDTH)) if case.prefix else None
        if self.is_image:
            self.embed, self.head = nn.Conv2d(2, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, case.words, 1)
        else:
            self.embed = nn.Linear(3, WIDTH) if case.inputs == "vectors" else nn.Embedding(case.words, WIDTH)
            self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, case.words)

    def scores(self, ids: Tensor, mask: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if self.is_image:
            places = self.places if self.case.is_fixed else self.places[:, : x.shape[2], : x.shape[3]]
            return self.head(torch.tanh(x + places)).movedim(1, -1)
        x = x if mask is None else x * mask[..., None]
        x = x if types is None else x + 0.1 * types[..., None]
        x = x if self.first is None else torch.cat([self.first.expand(len(x), -1, -1), x], dim=1)
        x = x + (self.places if self.case.is_fixed else self.places[: x.shape[1]])
        return self.head(torch.tanh(self.mix(x + x.cumsum(dim=1))))

    def forward(self, ids: Tensor, mask: Tensor | None = None, types: Tensor | None = None) -> Any:
        z = self.scores(ids, mask, types)
        z = z.movedim(-1, 1) if self.case.is_second else z
        kinds = {"logits": Returned(None, z), "dictionary": {"logits": z, "other": z.sum()}, "tuple": (z, z[:, :1])}
        return kinds.get(self.case.returns, z)


def draw_case(seed: int) -> Case:
    """Draw a case; half of them have lengths that coincide."""
    draw = random.Random(seed)
    case = Case(seed, draw.choice(["ids", "ids", "mask", "types", "vectors", "pixels"]), draw.choice([3, 4, 5]))
    case.is_second, case.is_fixed = draw.random() < 0.5, draw.random() < 0.3
    if case.inputs in ("ids", "mask", "types"):
        case.prefix = draw.choice([0, 0, 1, 2])
    T, P = case.length, case.length + case.prefix
    case.words = draw.choice([T, P, 2 * T, 3 * T, T + 1, T + 2, 7, 9])
    case.trained = draw.choice(["cross entropy"] * 3 + ["no loss", "own loss", "checkpoints"])
    case.returns = draw.choice(["tensor", "tensor", "logits", "dictionary"])
    if case.inputs == "pixels":
        case.asked = draw.choice(["log_probability", "loss_value"])
    else:
        if draw.random() < 0.15:
            case.trained = "label"
        case.answers = draw.choice(["all", "last", "word"])
        case.asked = draw.choice(["log_probability", "log_probability", "logit_difference", "loss_value"])
        case.answers = "word" if case.asked == "logit_difference" else case.answers
        case.answers = "all" if case.asked == "loss_value" and case.answers == "last" else case.answers
    if case.trained not in ("cross entropy", "label") and draw.random() < 0.3:
        case.returns = "tuple"
    case.ignored = draw.choice([LEFT_OUT, 0]) if case.trained == "cross entropy" else LEFT_OUT
    if case.trained in ("cross entropy", "own loss", "label"):
        case.door = draw.choice(["attribute", "attribute", "influence"])
    case.states_dim = not case.is_second or draw.random() < 0.5
    return case


def targets(case: Case, count: int, draw: torch.Generator) -> Tensor:
    """Words at all positions, of which some are left out, and those of a prefix."""
    shape = (case.length, case.length) if case.inputs == "pixels" else (case.length + case.prefix,)
    y = torch.randint(int(case.ignored == 0), case.words, (count, *shape), generator=draw)
    y = torch.where(torch.rand(y.shape, generator=draw) < 0.2, case.ignored, y)
    y[:, : case.prefix] = case.ignored
    y[:, -1] = y[:, -1].where(y[:, -1] != case.ignored, 1)
    return y


def made_inputs(case: Case, count: int, draw: torch.Generator) -> Any:
    if case.inputs in ("pixels", "vectors"):
        shape = (2, case.length, case.length) if case.inputs == "pixels" else (case.length, 3)
        return torch.randn(count, *shape, generator=draw).double()
    ids = torch.randint(case.words, (count, case.length), generator=draw)
    others = {"mask": torch.ones_like(ids), "types": ids % 2}
    return ids if case.inputs == "ids" else {"ids": ids} | dict(list(others.items())[: 1 + (case.inputs == "types")])


def taken(X: Any, rows: Tensor) -> Any:
    return {name: value[rows] for name, value in X.items()} if isinstance(X, dict) else X[rows]


def scores_of(net: Net, X: Any) -> Tensor:
    return net.scores(**X) if isinstance(X, dict) else net.scores(X)


def losses_of(case: Case, z: Tensor, y: Tensor) -> Tensor:
    if case.trained == "label":
        return F.cross_entropy(z[:, -1], y, reduction="none") / len(y)
    each = F.cross_entropy(z.movedim(-1, 1), y, reduction="none", ignore_index=case.ignored).flatten(1).sum(dim=1)
    return each if case.trained in ("no loss", "own loss", "checkpoints") else each / (y != case.ignored).sum()


def numbers_by_hand(case: Case, z: Tensor, answers: Tensor, other: Tensor) -> Tensor:
    """What is asked of each text, entry by entry, from scores with classes last."""
    found = []
    for i in range(len(z)):
        if case.asked == "logit_difference":
            found.append(z[i, -1, int(answers[i])] - z[i, -1, int(other[i])])
            continue
        rows, words = z[i].reshape(-1, z.shape[-1]), answers[i].flatten().tolist()
        log_p = [rows[len(rows) - len(words) + k, w] - rows[len(rows) - len(words) + k].exp().sum().log()
                 for k, w in enumerate(words) if w != case.ignored]  # fmt: skip
        found.append(sum(log_p) * (-1 if case.asked == "loss_value" else 1))
    return torch.stack(found)


@dataclass
class Training:
    """A case with its data, its recorded run or checkpoints, and what was seen of the loop from outside."""

    case: Case
    net: Net
    X: Any
    y: Tensor
    run: Any
    states: list[dict[str, Tensor]]
    batches: list[Tensor]


def train(case: Case) -> Training:
    torch.manual_seed(case.seed)
    draw = torch.Generator().manual_seed(case.seed)
    net, X, y = Net(case).double(), made_inputs(case, ROWS, draw), targets(case, ROWS, draw)
    y = y[:, -1].clone() if case.trained == "label" else y
    optimizer, batches = (
        torch.optim.SGD(net.parameters(), lr=RATE),
        [torch.tensor([0, 1, 2, 3]), torch.tensor([4, 5, 0, 2])],
    )
    states = [copy.deepcopy(net.state_dict())]
    if case.trained == "checkpoints":
        for b in batches:
            step(case, net, optimizer, taken(X, b), y[b])
            states.append(copy.deepcopy(net.state_dict()))
        return Training(case, net, X, y, None, states, batches)
    loss: Any = epk.CrossEntropy(ignore_index=None if case.ignored == LEFT_OUT else case.ignored)
    if case.trained == "cross entropy" and case.is_ambiguous and case.states_dim:
        loss = epk.CrossEntropy(ignore_index=case.ignored, dim=case.dim)
    elif case.trained == "no loss":
        loss = None
    elif case.trained == "own loss":
        loss = epk.PerSampleLoss(lambda returned, y: losses_of(case, plain(case, returned), y), reduction="sum")
    given = None if case.trained == "no loss" else y
    with epk.Recorder(net, optimizer, X, given, loss=loss, output=lambda r: last(case, r)) as recorder:
        for b in batches:
            step(case, net, optimizer, taken(X, b), y[b], lambda b=b: recorder.batch(b))
            states.append(copy.deepcopy(net.state_dict()))
    return Training(case, net, X, y, recorder.trajectory, states, batches)


def plain(case: Case, returned: Any) -> Tensor:
    z = {"logits": lambda r: r.logits, "dictionary": lambda r: r["logits"], "tuple": lambda r: r[0]}.get(case.returns)
    z = returned if z is None else z(returned)
    return z.movedim(1, -1) if case.is_second else z


def last(case: Case, returned: Any) -> Tensor:
    return plain(case, returned).flatten(1, -2)[:, -1]


def step(case: Case, net: Net, optimizer: Any, X: Any, y: Tensor, announce: Any = lambda: None) -> None:
    optimizer.zero_grad()
    returned = net(**X) if isinstance(X, dict) else net(X)
    losses_of(case, plain(case, returned), y).sum().backward()
    announce()
    optimizer.step()


def gradient(net: Net, value: Tensor) -> Tensor:
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, list(net.parameters()), **options)])


def shares_by_hand(t: Training, X: Any, answers: Tensor, other: Tensor) -> Tensor:
    found = torch.zeros(len(answers), ROWS, dtype=torch.float64)
    for (start, end), b in zip(pairwise(t.states), t.batches, strict=True):
        net = copy.deepcopy(t.net)
        net.load_state_dict(start)
        each = losses_of(t.case, scores_of(net, taken(t.X, b)), t.y[b])
        parts = torch.stack([gradient(net, value) for value in each])
        for place, weight in NODES:
            net.load_state_dict({name: torch.lerp(start[name], end[name], place) for name in start})
            values = numbers_by_hand(t.case, scores_of(net, X), answers, other)
            slopes = torch.stack([gradient(net, value) for value in values])
            found.index_add_(1, b, -RATE * weight * slopes @ parts.T)
    return found


def slopes_by_hand(t: Training, X: Any, answers: Tensor, other: Tensor) -> Tensor:
    found = []
    for i in range(ROWS):
        ends = []
        for shift in (1e-5, -1e-5):
            net = copy.deepcopy(t.net)
            net.load_state_dict(t.states[0])
            for b in t.batches:
                weights = 1 + shift * (b == i).double()
                g = gradient(net, (weights * losses_of(t.case, scores_of(net, taken(t.X, b)), t.y[b])).sum())
                w = nn.utils.parameters_to_vector(net.parameters()).detach() - RATE * g
                nn.utils.vector_to_parameters(w, net.parameters())
            ends.append(numbers_by_hand(t.case, scores_of(net, X), answers, other).detach())
        found.append((ends[0] - ends[1]) / 2e-5)
    return torch.stack(found, dim=1)


def asked_function(case: Case, answers: Tensor, other: Tensor, dim: int | None) -> Any:
    if case.asked == "logit_difference":
        return epk.RowFunction.logit_difference(answers, other, dim=dim)
    if case.asked == "loss_value":
        return epk.RowFunction.loss_value(
            answers, None if dim is None else epk.CrossEntropy(ignore_index=case.ignored, dim=dim)
        )
    return epk.RowFunction.log_probability(answers, dim=dim)


def outcome(case: Case) -> str:
    """Return "right", "refused" (an error asks for `dim`, with which the answer is right), "uncertified" or "wrong"."""
    t, draw = train(case), torch.Generator().manual_seed(case.seed + 1)
    X, answers = made_inputs(case, TESTS, draw), targets(case, TESTS, draw)
    other = torch.randint(case.words, (TESTS,), generator=draw)
    if case.answers != "all":
        answers = answers[:, -2:] if case.answers == "last" else answers[:, -1]
    try:
        return answer(t, X, answers, other, None)
    except ValueError as error:
        if "dim must say where scores" not in str(error):
            raise
    return "refused" if answer(t, X, answers, other, case.dim) == "right" else "wrong"


def answer(t: Training, X: Any, answers: Tensor, other: Tensor, dim: int | None) -> str:
    case, function = t.case, asked_function(t.case, answers, other, dim)
    expected = numbers_by_hand(case, scores_of(t.net, X), answers, other).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", epk.CertificateWarning)
        if case.trained == "checkpoints":
            found: Any = epk.between(t.net, t.states, X, function=function)
            network, rest = found.network[:, 0], found.pieces.sum(dim=(1, 2, 3)) + found.initial[:, 0] - expected
        elif case.door == "influence":
            found = epk.influence(t.run, X, function=function)
            network, rest = found.outputs[:, 0], found.values[:, 0] - slopes_by_hand(t, X, answers, other)
        else:
            found = epk.attribute(t.run, X, function=function)
            network, rest = found.network[:, 0], found.samples[:, 0] - shares_by_hand(t, X, answers, other)
    is_right = torch.allclose(network, expected, rtol=0, atol=1e-9) and float(rest.abs().max()) < 1e-6
    return ("right" if found.certified else "uncertified") if is_right else "wrong"


@dataclass
class CutCase:
    """A loop that cuts a batch of padded texts to its longest one; its targets need not be y, nor its words X."""

    seed: int
    has_mask: bool
    is_left: bool
    is_masked: bool
    is_noisy: bool

    @property
    def may_be_refused(self) -> bool:
        """Whether each text may have other words than X at both ends, and no mask says where they are."""
        return self.is_noisy and not self.has_mask


def draw_cut(seed: int) -> CutCase:
    draw = random.Random(seed)
    is_masked = draw.random() < 0.7
    return CutCase(seed, draw.random() < 0.5, draw.random() < 0.5, is_masked, is_masked and draw.random() < 0.5)


def cut_outcome(case: CutCase) -> str:
    """Return "right", "refused" (the inputs do not say which targets a pass had), or "wrong", of shares of words."""
    T, words, (X, y, mask, lengths), made = 7, 9, padded_texts(case), []
    net = Net(Case(case.seed, "mask" if case.has_mask else "ids", T, words + 1)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    with epk.Recorder(net, optimizer, X, y, output=lambda z: z[:, -1]) as recorder:
        for b in (torch.tensor([1, 4, 2]), torch.tensor([3, 1, 5]), torch.tensor([2, 0, 5])):
            longest = max(lengths[i] for i in b)
            cut = slice(T - longest, T) if case.is_left else slice(longest)
            seen, m, labels = (v[b][:, cut].clone() for v in (X["ids"] if case.has_mask else X, mask, y))
            if case.is_masked:
                hit = (torch.rand(seen.shape) < 0.5) | (torch.arange(longest) == (longest - 1 if case.is_left else 0))
                labels = labels.where(hit, LEFT_OUT)
                seen = torch.where(hit & (m > 0) & case.is_noisy, words, seen)
            given = {"ids": seen, "mask": m} if case.has_mask else seen
            each = F.cross_entropy(scores_of(net, given).mT, labels, reduction="none") / (labels != LEFT_OUT).sum()
            parts = torch.stack([gradient(net, value) for value in each.flatten()]).view(*labels.shape, -1)
            start = copy.deepcopy(net.state_dict())
            optimizer.zero_grad()
            F.cross_entropy((net(**given) if case.has_mask else net(given)).mT, labels).backward()
            recorder.batch(b)
            optimizer.step()
            made.append((start, copy.deepcopy(net.state_dict()), b, cut, parts))
    X_test, expected = taken(X, torch.arange(1)), torch.zeros(words + 1, ROWS, T, dtype=torch.float64)
    net = copy.deepcopy(net)
    for start, end, b, cut, parts in made:
        for place, weight in NODES:
            net.load_state_dict({name: torch.lerp(start[name], end[name], place) for name in start})
            slopes = torch.stack([gradient(net, value) for value in scores_of(net, X_test)[0, -1]])
            for row, i in enumerate(b.tolist()):
                expected[:, i, cut] -= RATE * weight * slopes @ parts[row].T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", epk.CertificateWarning)  # of rows that no index confirms
        try:
            found = epk.attribute_tokens(recorder.trajectory, X_test, sequences=torch.arange(ROWS), head="logits")
        except ValueError as error:
            if "must show by its inputs which ones" not in str(error):
                raise
            return "refused"
    return "right" if float((found.tokens[0] - expected).abs().max()) < 1e-9 else "wrong"


def padded_texts(case: CutCase) -> tuple[Any, Tensor, Tensor, list[int]]:
    """Inputs, words as their own targets, mask and lengths; the first text is the longest."""
    torch.manual_seed(case.seed)
    lengths = [7, *torch.randint(2, 6, (ROWS - 1,)).tolist()]
    mask = torch.stack([torch.arange(7) >= 7 - n if case.is_left else torch.arange(7) < n for n in lengths]).long()
    ids = torch.randint(1, 9, (ROWS, 7)) * mask
    return {"ids": ids, "mask": mask} if case.has_mask else ids, ids.where(mask > 0, LEFT_OUT), mask, lengths


def count_outcomes(count: int, first: int = 0) -> tuple[Counter[str], list[Any]]:
    """Return how often what became of some cases, and those that were wrong."""
    tried = [(outcome, draw_case(seed)) for seed in range(first, first + count)]
    tried += [(cut_outcome, draw_cut(seed)) for seed in range(first, first + count // 4)]
    found = [judge(case) for judge, case in tried]
    return Counter(found), [case for (_, case), own in zip(tried, found, strict=True) if own == "wrong"]
