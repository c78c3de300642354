import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset
from epk_gp.datasets import three_gaussians

torch.manual_seed(0)
data = three_gaussians(12, dim=5)
X, y = data.inputs, data.labels
dataset = IndexedDataset(TensorDataset(X, y))  # recorder: items with their indices
loader = DataLoader(dataset, batch_size=6, shuffle=True)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
net = net.double()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
net, optimizer, loader, scheduler = accelerator.prepare(
    net, optimizer, loader, scheduler
)
with epk.Recorder(net, optimizer, X, y) as recorder:  # recorder
    net.train()
    for epoch in range(2):
        for indices, (inputs, labels) in loader:
            with accelerator.accumulate(net):
                loss = F.cross_entropy(net(inputs), labels)
                accelerator.backward(loss)
                recorder.batch(indices)  # recorder
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
X_test = X[:2] + 0.1
