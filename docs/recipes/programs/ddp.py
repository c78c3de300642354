import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import epk_gp as epk
from epk_gp.datasets import three_gaussians

distributed.init_process_group("gloo")  # or "nccl"
rank, size = distributed.get_rank(), distributed.get_world_size()
data = three_gaussians(12, dim=5)
X, y = data.inputs, data.labels
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
net = DistributedDataParallel(net.double())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

options = {"folder": "run", "resume": True, "storage": epk.Storage(steps=2)}
with epk.Recorder(net, optimizer, X, y, **options) as recorder:  # recorder
    for step in recorder.until(6):
        epoch, number = divmod(step, 3)
        order = torch.randperm(36, generator=torch.Generator().manual_seed(epoch))
        batch = order[12 * number : 12 * (number + 1)][rank::size]
        optimizer.zero_grad()
        F.cross_entropy(net(X[batch]), y[batch]).backward()
        recorder.batch(batch)  # recorder: of this rank
        optimizer.step()

if rank == 0:  # the others have no trajectory
    parts = epk.attribute(recorder.trajectory, X[:2] + 0.1)
    print(f"certified {parts.certified}, {recorder.num_steps} steps")
distributed.destroy_process_group()
