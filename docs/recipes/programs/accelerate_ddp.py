import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset
from epk_gp.datasets import three_gaussians

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
data = three_gaussians(12, dim=5)
X, y = data.inputs, data.labels
dataset = IndexedDataset(TensorDataset(X, y))  # recorder: items with their indices
loader = DataLoader(dataset, batch_size=4, shuffle=True)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
net = net.double()
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)

with epk.Recorder(net, optimizer, X, y) as recorder:  # recorder
    net.train()
    for epoch in range(2):
        for indices, (inputs, labels) in loader:
            with accelerator.accumulate(net):
                loss = F.cross_entropy(net(inputs), labels)
                accelerator.backward(loss)
                recorder.batch(indices)  # recorder
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 0.3)
                optimizer.step()
                optimizer.zero_grad()

if accelerator.is_main_process:
    parts = epk.attribute(recorder.trajectory, X[:2] + 0.1)
    print(f"certified {parts.certified}, {recorder.num_steps} steps")
accelerator.end_training()
