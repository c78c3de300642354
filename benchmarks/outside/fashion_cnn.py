"""The network of laplace-torch's example "calibration with a GP", and its training: a CNN on Fashion-MNIST.

laplace-torch downloads the weights `FMNIST_CNN_10_2.2e+02.pt`. Their architecture is DeepOBS's 3c3d with tanh in the
dense layers; they were trained by `experiments/imgclassification.py` of AlexImmer/BNN-predictions: Adam at 1e-3 / (1 +
epoch // 10), batches of 512, 500 epochs, seed 10 and the prior precision 220 on a loss that sums over all images. Here
the same decay takes 2 epochs in the place of 10, as there are some 20 epochs in the place of 500, and forward passes
are in bfloat16 (autocast; weights are float32).
"""

import time
from pathlib import Path

import torch
from torch import nn

PRIOR_PRECISION, SEED, LR, BATCH = 220.0, 10, 1e-3, 512


def fashion_cnn() -> nn.Module:
    """Return the untrained network of 892,010 weights."""
    layers = nn.Sequential(
        *(nn.Conv2d(1, 64, 5), nn.ReLU(), nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(64, 96, 3), nn.ReLU(), nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Flatten()),
        *(nn.Linear(3 * 3 * 128, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 10)),
    )
    for module in layers:
        if isinstance(module, nn.Conv2d):
            nn.init.xavier_normal_(module.weight)
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.zeros_(module.bias)
    return layers


def train(
    net: nn.Module, X: torch.Tensor, y: torch.Tensor, epochs: int, file: Path | None = None, minutes: float = 20.0
) -> int:
    """Train for some epochs or minutes, whichever end first; return the number of epochs.

    Adam does not see the scale of a loss, so the mean over a batch stands for the sum over all images.

    Args:
        net: The network.
        X: Images.
        y: Their classes.
        epochs: How many at most.
        file: Where the weights are stored after each epoch; None stores none.
        minutes: After which no further epoch begins.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=LR, weight_decay=PRIOR_PRECISION / len(X))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (epoch // 2 + 1))
    net.to(memory_format=torch.channels_last)
    order, begun = torch.Generator().manual_seed(SEED), time.perf_counter()
    for epoch in range(epochs):
        for rows in torch.randperm(len(X), generator=order).split(BATCH):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(net(X[rows]), y[rows])
            loss.backward()
            optimizer.step()
        schedule.step()
        seconds = time.perf_counter() - begun
        if file is not None:
            torch.save({"state": net.state_dict(), "epochs": epoch + 1, "seconds": seconds}, file)
        if seconds > 60 * minutes:
            break
    return epoch + 1
