import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset  # recorder
from epk_gp.datasets import digits


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(32, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


torch.manual_seed(0)
data = digits()
images, labels = data.inputs[:120], data.labels[:120]
test_images, test_labels = data.inputs[-100:], data.labels[-100:]
loader = DataLoader(
    IndexedDataset(TensorDataset(images, labels)), batch_size=20, shuffle=True
)

net = Net().double()
optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
recorder = epk.Recorder(net, optimizer, images, labels, loss=nn.NLLLoss())  # recorder
with recorder:  # recorder
    for epoch in range(3):
        net.train()
        for indices, (inputs, targets) in loader:
            optimizer.zero_grad()
            loss = F.nll_loss(net(inputs), targets)
            loss.backward()
            recorder.batch(indices)  # recorder
            optimizer.step()
        net.eval()
        with torch.no_grad():
            accuracy = (net(test_images).argmax(dim=1) == test_labels).double().mean()
        scheduler.step()
X_test = test_images[:2]
