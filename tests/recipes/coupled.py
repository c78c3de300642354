"""Losses that are not stated: their rows hold one another, or an advantage."""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from recipes.loops import mlp
from recipes.problem import C, train, vectors

X, Y = vectors(24)
TEST = vectors(26)[0][24:]


def unstated(net, loss_of_batch, *passes, **options):
    """Train without a loss for the recorder. `passes` return the rows of each pass from those of the batch."""

    def announce(recorder, batch):
        for rows in passes or (lambda batch: batch,):
            recorder.batch(rows(batch))

    return train(net, X, None, TEST, loss_of_batch, announce=announce, loss=None, **options)


def siamese_pairs():
    """The contrastive loss of Hadsell et al. (2006), on two calls of the network."""
    net = mlp()

    def loss(batch):
        other = batch.roll(1)
        distance = F.pairwise_distance(net(X[batch]), net(X[other]))
        is_same = (Y[batch] == Y[other]).double()
        return (is_same * distance**2 + (1 - is_same) * F.relu(1.5 - distance) ** 2).mean()

    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    return unstated(net, loss, lambda b: b, lambda b: b.roll(1), optimizer=optimizer)


def triplets_in_one_pass():
    net = mlp(batch_norm=True)
    triplet = nn.TripletMarginLoss(margin=1.0)

    def rows(batch):
        return torch.cat([batch, batch.roll(3), batch.roll(1)])

    return unstated(net, lambda b: triplet(*net(X[rows(b)]).chunk(3)), rows)


ACTIONS, RETURNS = torch.arange(24) * 7 % C, torch.linspace(-1.0, 2.0, 24).double().cos()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 7), nn.Tanh())
        self.actor, self.critic = nn.Linear(7, C), nn.Linear(7, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.actor(h), self.critic(h).squeeze(1)


def policy(returned):
    return returned[0]


def ppo():
    """Schulman et al. (2017), with advantages normalised in each batch, a clipped ratio, and an entropy term."""
    net = ActorCritic().double()
    with torch.no_grad():
        logits, values = net(X)
        old, advantages = Categorical(logits=logits).log_prob(ACTIONS), RETURNS - values

    def loss(batch):
        logits, values = net(X[batch])
        actions = Categorical(logits=logits)
        ratio = (actions.log_prob(ACTIONS[batch]) - old[batch]).exp()
        a = (advantages[batch] - advantages[batch].mean()) / (advantages[batch].std() + 1e-8)
        gain = torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a).mean() + 0.01 * actions.entropy().mean()
        return 0.5 * F.mse_loss(values, RETURNS[batch]) - gain

    optimizer = torch.optim.Adam(net.parameters(), lr=0.02, eps=1e-5)
    return unstated(net, loss, optimizer=optimizer, epochs=3, output=policy)


RECIPES = [siamese_pairs, triplets_in_one_pass, ppo]
