import torch
from torch import nn

import epk_gp as epk
from epk_gp.datasets import digits


class LookaheadState:
    """Slow weights, to which the network returns every few steps."""

    def __init__(self, net):
        self.slow = {k: v.clone() for k, v in net.state_dict().items()}

    def update(self, net, decay):
        for slow, fast in zip(
            self.slow.values(), net.state_dict().values(), strict=True
        ):
            if slow.is_floating_point():
                slow.lerp_(fast, 1 - decay)
                fast.copy_(slow)


class ConvGroup(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding="same", bias=False)
        self.pool, self.norm1 = nn.MaxPool2d(2), nn.BatchNorm2d(outputs, momentum=0.4)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding="same", bias=False)
        self.norm2, self.activ = nn.BatchNorm2d(outputs, momentum=0.4), nn.GELU()

    def forward(self, x):
        x = self.activ(self.norm1(self.pool(self.conv1(x))))
        return self.activ(self.norm2(self.conv2(x)))


torch.manual_seed(0)
data = digits()
X, y, X_test = data.inputs[:48], data.labels[:48], data.inputs[-1:]
net = nn.Sequential(
    nn.Conv2d(1, 4, 2), nn.GELU(), ConvGroup(4, 6), nn.MaxPool2d(3), nn.Flatten()
)
net = net.append(nn.Linear(6, 10, bias=False)).double()
net[0].weight.requires_grad_(False)  # airbench whitens its images with this layer
loss_fn = nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum")
biases = [p for n, p in net.named_parameters() if "norm" in n and p.requires_grad]
others = [p for n, p in net.named_parameters() if "norm" not in n and p.requires_grad]
options = {"momentum": 0.85, "nesterov": True, "weight_decay": 2e-3}
optimizer = torch.optim.SGD(
    [{"params": biases, "lr": 0.02}, {"params": others, "lr": 2e-3}], **options
)
epochs, steps, size = 3, 9, 16
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 - 0.9 * i / steps)
alphas = 0.95**5 * (torch.arange(steps + 1) / steps) ** 3
lookahead, step = LookaheadState(net), 0
with epk.Recorder(net, optimizer, X, y, loss=loss_fn) as recorder:  # recorder
    for epoch in range(epochs):
        net.train()
        images = X.flip(-1) if epoch % 2 else X  # alternating flip
        for batch in torch.randperm(len(X)).split(size):
            loss_fn(net(images[batch]), y[batch]).backward()
            recorder.batch(batch)  # recorder
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            step += 1
            if step % 3 == 0:
                lookahead.update(net, decay=alphas[step].item())
    lookahead.update(net, decay=1.0)
