import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset, RecorderCallback
from epk_gp.datasets import three_gaussians


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def training_step(self, batch, number):
        _, (inputs, labels) = batch  # the indices come first
        return F.cross_entropy(self.net(inputs), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)


data = three_gaussians(12, dim=5)
X, y = data.inputs, data.labels
dataset = IndexedDataset(TensorDataset(X, y))
loader = DataLoader(dataset, batch_size=4, shuffle=True)
module = Classifier()
callback = RecorderCallback(module.net, X, y)  # recorder
trainer = Trainer(
    strategy="ddp",
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=0.3,
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, loader)

if trainer.is_global_zero:
    parts = epk.attribute(callback.trajectory, X[:2] + 0.1)
    print(f"certified {parts.certified}, {callback.trajectory.num_steps} steps")
