"""What every recipe begins with, small data, and what it ends with, a recorded run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import epk_gp as epk

C = 3  # classes


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recipe's run.

    Attributes:
        recorder: The recorder, or the callback, with `trajectory`.
        net: The trained network.
        X_test: Inputs for `attribute` and `reconstruct`.
        outputs: The trained network's outputs there, (n, C), as the user computes them in evaluation mode.
        X: The training inputs, as given to the recorder.
        y: The targets.
        output: Maps what the network returns to the outputs.
        nodes: Of a graph, the nodes that `outputs` belong to; the network takes all of it.
        path: The trajectory that explains the network, where it is not the recorder's.
    """

    recorder: Any
    net: nn.Module
    X_test: Any
    outputs: Tensor
    X: Any
    y: Any
    output: Callable[[Any], Tensor]
    nodes: Tensor | None = None
    path: Any = None

    @property
    def points(self):
        """What `attribute` and `reconstruct` take."""
        return self.X_test if self.nodes is None else self.nodes

    @property
    def trajectory(self):
        return self.recorder.trajectory if self.path is None else self.path


def finish(recorder, net, X_test, X, y, output: Callable[[Any], Tensor] = lambda returned: returned) -> Recorded:
    """Evaluate the trained network as users do."""
    net.eval()
    with torch.no_grad():
        returned = net(**X_test) if isinstance(X_test, dict) else net(*as_tuple(X_test))
    return Recorded(recorder, net, X_test, output(returned), X, y, output)


def as_tuple(X):
    """Return the network's positional arguments."""
    return X if isinstance(X, tuple) else (X,)


def images(n, size=6):
    """Return n noisy images of C kinds, and their labels: a bright bar whose place says the class."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % C
    X = 0.5 * torch.randn(n, 1, size, size, generator=generator, dtype=torch.float64)
    for i in range(n):
        X[i, :, :, 2 * int(y[i]) % size] += 1.0
    return X, y


def vectors(n, dim=5, dtype=torch.float64):
    """Return n points around C centres, and their labels."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(n) % C
    centres = torch.randn(C, dim, generator=generator, dtype=torch.float64)
    return (centres[y] + 0.5 * torch.randn(n, dim, generator=generator, dtype=torch.float64)).to(dtype), y


def sentences(n, length=6, vocabulary=9):
    """Return n sentences of unequal lengths, padded with 0, and labels that depend on their tokens."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, vocabulary, (n, length), generator=generator)
    lengths = torch.randint(2, length + 1, (n,), generator=generator)
    tokens = tokens * (torch.arange(length) < lengths[:, None])
    return tokens, tokens.sum(dim=1) % C


def batches(n, size, epochs):
    """Return the batches of some epochs, shuffled; the last of an epoch is smaller where `size` does not divide n."""
    return [batch for _ in range(epochs) for batch in torch.randperm(n).split(size)]


def itself(returned):
    return returned


def announce_once(recorder, batch):
    recorder.batch(batch)


def nothing():
    pass


def train(
    net, X, y, X_test, loss_of, *, optimizer=None, size=8, epochs=2, announce=announce_once, after_step=nothing,
    output=itself, **options,
):  # fmt: skip
    """Train on shuffled batches, as most loops do; `loss_of` is the loop's loss of a batch of row numbers."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if optimizer is None else optimizer
    several = optimizer if isinstance(optimizer, list) else [optimizer]
    options |= {} if output is itself else {"output": output}
    with epk.Recorder(net, optimizer, X, y, **options) as recorder:  # recorder
        net.train()
        for batch in batches(len(X) if y is None else len(y), size, epochs):
            for each in several:
                each.zero_grad()
            loss_of(batch).backward()
            announce(recorder, batch)  # recorder
            for each in several:
                each.step()
            after_step()
    return finish(recorder, net, X_test, X, y, output)
