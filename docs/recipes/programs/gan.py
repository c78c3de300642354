import torch
from torch import nn

import epk_gp as epk
from epk_gp.datasets import digits

torch.manual_seed(0)
X = digits().inputs[:32]
latent = 4
netG = nn.Sequential(
    nn.ConvTranspose2d(latent, 4, 4, bias=False),
    nn.BatchNorm2d(4),
    nn.ReLU(),
    nn.ConvTranspose2d(4, 1, 4, 2, 1),
    nn.Tanh(),
).double()
netD = nn.Sequential(
    nn.Conv2d(1, 4, 4, 2, 1),
    nn.LeakyReLU(0.2),
    nn.Conv2d(4, 1, 4),
    nn.Flatten(),
).double()
criterion = nn.BCEWithLogitsLoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
generated = torch.full((8,), -1)  # recorder: rows that are no training images

with epk.Recorder(netD, optimizerD, X, None, loss=None) as recorder:  # recorder
    for epoch in range(2):
        for batch in torch.randperm(len(X)).split(8):
            netD.zero_grad()
            real, fake = torch.ones(8, 1).double(), torch.zeros(8, 1).double()
            criterion(netD(X[batch]), real).backward()
            recorder.batch(batch)  # recorder
            images = netG(torch.randn(8, latent, 1, 1).double())
            criterion(netD(images.detach()), fake).backward()
            recorder.batch(generated)  # recorder
            optimizerD.step()

            netG.zero_grad()
            criterion(netD(images), real).backward()
            optimizerG.step()
X_test = digits().inputs[-2:]
