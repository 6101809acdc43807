"""Training steps of families of models, written before an estimate of one was seen.

Molecules in space, streams of events, typed graphs, links with sampled opposites,
hierarchies of pools, graph transformers, embeddings of walks, clouds of points; loops
that wait for a fixed point, two optimizers' games, queues, transforms of functions,
packed and attended recurrences, volumes, flows, fake quantisation, spectra, mixtures
and alignments.  ``drawn_architectures.py`` draws those of transformers.
"""

import copy
import itertools
import random
import warnings

import torch
import torch_geometric.nn as g
from drawn import DrawnStep, Trained
from drawn_habits import Do
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch.nn.utils import rnn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import (
    add_self_loops,
    dropout_edge,
    negative_sampling,
    scatter,
    softmax,
    to_dense_adj,
    to_dense_batch,
    to_undirected,
)

from loaderkit.budget.step.train_step import Step


def _adafactor(parameters):
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=False)


OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adamw, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd, momentum": lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
    "sgd, foreach": lambda p: torch.optim.SGD(p, 0.1, 0.9, foreach=True),
    "adafactor": _adafactor,
    "torch's adafactor": torch.optim.Adafactor,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "none": None,
}


def _parameter(*shape):
    return nn.Parameter(torch.randn(*shape) * 0.1)


def _mlp(*widths):
    layers = []
    for number in range(len(widths) - 1):
        layers += [nn.Linear(widths[number], widths[number + 1]), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


def _graphs(rng, width=8, **more):
    graphs = []
    for _ in range(rng.choice([2, 9])):
        nodes = rng.randint(5, 40)
        edges = to_undirected(torch.randint(nodes, (2, nodes * rng.choice([1, 3]))))
        fields = {key: draw(nodes, edges.shape[1]) for key, draw in more.items()}
        x = torch.randn(nodes, width)
        graphs.append(Data(x=x, edge_index=edges, y=torch.randn(1), **fields))
    return Batch.from_data_list(graphs)


def _molecules(rng):
    molecules = []
    for _ in range(rng.choice([2, 6])):
        atoms = rng.randint(4, 14)
        z, pos = torch.randint(1, 9, (atoms,)), torch.randn(atoms, 3) * 2
        molecules.append(Data(z=z, pos=pos, y=torch.randn(1)))
    return Batch.from_data_list(molecules)


def _pairs(batch):
    """All ordered pairs of atoms of one molecule."""
    same = batch[:, None] == batch[None, :]
    return (same & ~torch.eye(len(batch), dtype=torch.bool)).nonzero().T


# Molecules ---------------------------------------------------------------------------


class _AllPairs(nn.Module):
    """Stands where PyG's models look for neighbours: whole molecules, and lengths."""

    def forward(self, pos, batch):
        row, col = edges = _pairs(batch)
        return edges, (pos[row] - pos[col]).norm(dim=-1)


def schnet(rng):
    width = rng.choice([16, 64])
    inner = g.SchNet(
        width, width, 3, 20, readout=rng.choice(["add", "mean"]), interaction_graph=None
    )
    inner.interaction_graph = _AllPairs()
    forces = rng.random() < 0.5

    def forward(m, data):
        pos = data.pos.detach().clone().requires_grad_()
        energy = m.inner(data.z, pos, data.batch)
        loss = F.mse_loss(energy.squeeze(-1), data.y)
        if forces:
            force = torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
            loss = loss + force.square().mean()
        return loss

    return Trained(
        f"{width}, forces {forces}", Do(forward, inner=inner), _molecules(rng)
    )


def continuous_filters(rng):
    """A SchNet by hand, with cosine cutoffs and shifted softplus."""
    width, basis = rng.choice([16, 64]), rng.choice([8, 50])

    def forward(m, data):
        row, col = _pairs(data.batch)
        far = (data.pos[row] - data.pos[col]).norm(dim=-1)
        spread = torch.exp(-10 * (far[:, None] - torch.linspace(0, 5, basis)) ** 2)
        cut = 0.5 * (torch.cos(far * torch.pi / 5) + 1) * (far < 5)
        h = m.table(data.z)
        for layer, gate in zip(m.layers, m.filters, strict=True):
            message = layer(h)[col] * gate(spread) * cut[:, None]
            update = scatter(message, row, 0, len(h), "sum")
            h = h + F.softplus(update) - 0.69
        return F.l1_loss(scatter(m.last(h).squeeze(-1), data.batch), data.y)

    model = Do(
        forward,
        table=nn.Embedding(10, width),
        layers=nn.ModuleList(nn.Linear(width, width, False) for _ in range(3)),
        filters=nn.ModuleList(_mlp(basis, width, width) for _ in range(3)),
        last=nn.Linear(width, 1),
    )
    return Trained(f"{width}, {basis}", model, _molecules(rng))


def painn(rng):
    """Scalars and vectors that exchange messages."""
    width = rng.choice([8, 48])

    def forward(m, data):
        row, col = _pairs(data.batch)
        way = data.pos[row] - data.pos[col]
        far = way.norm(dim=-1, keepdim=True)
        unit = way / (far + 1e-6)
        radial = torch.sin(far * torch.arange(1, 9) * torch.pi / 5) / (far + 1e-6)
        s, v = m.table(data.z), torch.zeros(len(data.z), 3, width)
        for phi, gate, mix, update in m.blocks:
            a, b, c = (phi(s)[col] * gate(radial)).chunk(3, -1)
            s = s + scatter(a, row, 0, len(s), "sum")
            v = v + scatter(
                v[col] * b[:, None] + unit[..., None] * c[:, None],
                row,
                0,
                len(s),
                "sum",
            )
            left, right = mix(v).chunk(2, -1)
            a, b, c = update(torch.cat([s, left.norm(dim=1)], -1)).chunk(3, -1)
            s = s + a + b * (left * right).sum(1)
            v = v + c[:, None] * left
        return F.mse_loss(scatter(m.last(s).squeeze(-1), data.batch), data.y)

    blocks = nn.ModuleList(
        nn.ModuleList(
            [
                _mlp(width, width, 3 * width),
                nn.Linear(8, 3 * width),
                nn.Linear(width, 2 * width, False),
                _mlp(2 * width, width, 3 * width),
            ]
        )
        for _ in range(2)
    )
    model = Do(
        forward, table=nn.Embedding(10, width), blocks=blocks, last=nn.Linear(width, 1)
    )
    return Trained(f"{width}", model, _molecules(rng))


def egnn(rng):
    """Coordinates that move with the features."""
    width, norm = rng.choice([16, 64]), rng.random() < 0.5

    def forward(m, data):
        row, col = _pairs(data.batch)
        h, x = m.table(data.z), data.pos
        for edge, node, move in m.layers:
            way = x[row] - x[col]
            square = way.square().sum(-1, keepdim=True)
            message = edge(torch.cat([h[row], h[col], square], -1))
            way = F.normalize(way, dim=-1) if norm else way
            x = x + scatter(way * move(message), row, 0, len(h), "mean")
            total = scatter(message, row, 0, len(h), "sum")
            h = h + node(torch.cat([h, total], -1))
        return (x - data.pos).square().mean() + m.last(h).mean()

    layers = nn.ModuleList(
        nn.ModuleList(
            [
                _mlp(2 * width + 1, width, width),
                _mlp(2 * width, width, width),
                _mlp(width, width, 1),
            ]
        )
        for _ in range(3)
    )
    model = Do(
        forward, table=nn.Embedding(10, width), layers=layers, last=nn.Linear(width, 1)
    )
    return Trained(f"{width}, norm {norm}", model, _molecules(rng))


def angles(rng):
    """Messages between edges by the angles between them, as DimeNet's."""
    width = rng.choice([8, 32])

    def forward(m, data):
        row, col = _pairs(data.batch)
        way = data.pos[row] - data.pos[col]
        first, second = (col[:, None] == row[None, :]).nonzero().T
        keep = row[first] != col[second]
        first, second = first[keep], second[keep]
        angle = torch.atan2(
            torch.linalg.cross(way[first], way[second]).norm(dim=-1),
            (way[first] * way[second]).sum(-1),
        )
        basis = torch.cos(angle[:, None] * torch.arange(6.0))
        h = m.table(data.z)
        e = m.begin(torch.cat([h[row], h[col], way.norm(dim=-1, keepdim=True)], -1))
        for lift, bilinear in m.blocks:
            message = torch.einsum(
                "tw,tb,wbv->tv", lift(e)[second], basis, bilinear.weight
            )
            e = e + scatter(message, first, 0, len(e), "sum")
        return F.mse_loss(scatter(m.last(e).squeeze(-1), data.batch[row]), data.y)

    class Weight(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = _parameter(width, 6, width)

    blocks = nn.ModuleList(
        nn.ModuleList([nn.Linear(width, width), Weight()]) for _ in range(2)
    )
    model = Do(
        forward,
        table=nn.Embedding(10, width),
        begin=_mlp(2 * width + 1, width, width),
        blocks=blocks,
        last=nn.Linear(width, 1),
    )
    return Trained(f"{width}", model, _molecules(rng))


def attentive_fingerprint(rng):
    width = rng.choice([16, 48])
    inner = g.AttentiveFP(8, width, 1, 4, 2, rng.choice([1, 3]), 0.1)
    data = _graphs(rng, edge_attr=lambda _, edges: torch.randn(edges, 4))

    def forward(m, data):
        out = m.inner(data.x, data.edge_index, data.edge_attr, data.batch)
        return F.mse_loss(out.squeeze(-1), data.y)

    return Trained(f"{width}", Do(forward, inner=inner), data)


# Streams, types, links ---------------------------------------------------------------


def temporal_memory(rng):
    """TGN: a memory that messages write, read by attention over recent neighbours."""
    nodes, width, events = rng.choice([30, 200]), rng.choice([8, 32]), 40
    memory = g.TGNMemory(
        nodes,
        5,
        width,
        8,
        g.models.tgn.IdentityMessage(5, width, 8),
        rng.choice([g.models.tgn.LastAggregator, g.models.tgn.MeanAggregator])(),
    )

    def forward(m, src, dst, t, msg):
        neg = torch.randint(nodes, src.shape)
        n_id = torch.cat([src, dst, neg]).unique()
        where = torch.zeros(nodes, dtype=torch.long)
        where[n_id] = torch.arange(len(n_id))
        z, last = m.memory(n_id)
        edges = torch.stack([where[src], where[dst]])
        age = (last[edges[0]] - t).to(z.dtype)
        attr = torch.cat([m.memory.time_enc(age), msg], -1)
        z = m.conv(z, edges, attr)
        good = m.score(torch.cat([z[where[src]], z[where[dst]]], -1))
        bad = m.score(torch.cat([z[where[src]], z[where[neg]]], -1))
        loss = F.binary_cross_entropy_with_logits(good, torch.ones_like(good))
        loss = loss + F.binary_cross_entropy_with_logits(bad, torch.zeros_like(bad))
        m.memory.update_state(src, dst, t, msg)
        m.memory.detach()
        return loss

    conv = g.TransformerConv(width, width // 2, heads=2, edge_dim=8 + 5, dropout=0.1)
    model = Do(forward, memory=memory, conv=conv, score=_mlp(2 * width, width, 1))
    batch = (
        torch.randint(nodes, (events,)),
        torch.randint(nodes, (events,)),
        torch.arange(events),
        torch.randn(events, 5),
    )
    return Trained(f"{nodes} nodes, {width}", model, batch)


def snapshots(rng):
    """A recurrent network over the states of a graph that changes."""
    width, steps = rng.choice([8, 32]), rng.choice([3, 8])
    nodes = rng.choice([20, 150])

    def forward(m, x, edges):
        h = torch.zeros(nodes, width)
        loss = 0
        for now, at in zip(x, edges, strict=True):
            both = torch.cat([now, h], -1)
            z, r = m.gates(both, at).sigmoid().chunk(2, -1)
            new = m.candidate(torch.cat([now, r * h], -1), at).tanh()
            h = z * h + (1 - z) * new
            loss = loss + F.smooth_l1_loss(m.last(h), now)
        return loss

    model = Do(
        forward,
        gates=g.ChebConv(6 + width, 2 * width, 2),
        candidate=g.GCNConv(6 + width, width),
        last=nn.Linear(width, 6),
    )
    edges = [torch.randint(nodes, (2, 3 * nodes)) for _ in range(steps)]
    return Trained(f"{nodes} x {steps}", model, (torch.randn(steps, nodes, 6), edges))


def _typed(rng):
    data = HeteroData()
    for kind in ("a", "b", "c"):
        data[kind].x = torch.randn(rng.randint(10, 60), 8)
    for pair in (("a", "b"), ("b", "a"), ("b", "c"), ("c", "c")):
        ends = [
            torch.randint(data[end].num_nodes, (rng.randint(20, 90),)) for end in pair
        ]
        length = min(map(len, ends))
        edges = torch.stack([end[:length] for end in ends])
        data[pair[0], "to" + pair[1], pair[1]].edge_index = edges
    data["b"].y = torch.randint(4, (data["b"].num_nodes,))
    return data


def typed_stack(rng):
    """HGT, or typed convolutions, with one class for each node of one type."""
    data, width = _typed(rng), rng.choice([16, 32])
    kind = rng.choice(["hgt", "han", "hetero"])

    def forward(m, data):
        x = {key: m.begin[key](value).relu() for key, value in data.x_dict.items()}
        for layer in m.layers:
            out = layer(x, data.edge_index_dict)
            x = {key: x[key] + F.dropout(out[key], 0.1) for key in out if key in x}
        return F.cross_entropy(m.last(x["b"]), data["b"].y, label_smoothing=0.1)

    def layer():
        if kind == "hgt":
            return g.HGTConv(width, width, data.metadata(), heads=4)
        if kind == "han":
            return g.HANConv(width, width, data.metadata(), heads=2)
        return g.HeteroConv(
            {edge: g.SAGEConv((width, width), width) for edge in data.edge_types},
            aggr=rng.choice(["sum", "max", "mean"]),
        )

    model = Do(
        forward,
        begin=nn.ModuleDict({key: nn.Linear(8, width) for key in data.node_types}),
        layers=nn.ModuleList([layer()]),
        last=nn.Linear(width, 4),
    )
    return Trained(f"{kind}, {width}", model, data)


def relational(rng):
    """R-GCN with bases or blocks, and DistMult over sampled opposites."""
    nodes, width, relations = rng.choice([50, 300]), 16, rng.choice([3, 12])
    options = rng.choice([{"num_bases": 4}, {"num_blocks": 4}, {}])
    kind = rng.choice([g.RGCNConv, g.FastRGCNConv])

    def forward(m, edges, kinds):
        z = m.conv(m.table, edges, kinds).relu()
        z = F.dropout(m.again(z, edges, kinds), 0.2)
        wrong = negative_sampling(edges, nodes, edges.shape[1])
        kinds_of_wrong = kinds[: wrong.shape[1]]
        good = (z[edges[0]] * m.relation[kinds] * z[edges[1]]).sum(-1)
        bad = (z[wrong[0]] * m.relation[kinds_of_wrong] * z[wrong[1]]).sum(-1)
        scores = torch.cat([good, bad])
        truth = torch.cat([torch.ones_like(good), torch.zeros_like(bad)])
        loss = F.binary_cross_entropy_with_logits(scores, truth)
        return loss + 0.01 * z.pow(2).mean()

    model = Do(
        forward,
        table=_parameter(nodes, width),
        conv=kind(width, width, relations, **options),
        again=kind(width, width, relations, **options),
        relation=_parameter(relations, width),
    )
    edges = torch.randint(nodes, (2, 4 * nodes))
    kinds = torch.randint(relations, (4 * nodes,))
    return Trained(f"{nodes}, {relations}, {options}", model, (edges, kinds))


def link_prediction(rng):
    """Edges that are left out, sampled opposites and a ranking loss."""
    nodes, width = rng.choice([60, 400]), rng.choice([16, 64])
    conv = rng.choice([g.SAGEConv, g.GCNConv, g.GATv2Conv])
    method = rng.choice(["sparse", "dense"])

    def forward(m, x, edges):
        kept, _ = dropout_edge(edges, p=0.3, training=True)
        z = m.second(F.elu(m.first(x, kept)), kept)
        wrong = negative_sampling(edges, nodes, edges.shape[1], method=method)
        good = (z[edges[0]] * z[edges[1]]).sum(-1)
        bad = (z[wrong[0]] * z[wrong[1]]).sum(-1)
        count = min(len(good), len(bad))
        return -F.logsigmoid(good[:count] - bad[:count]).mean()

    model = Do(forward, first=conv(12, width), second=conv(width, width))
    batch = (torch.randn(nodes, 12), torch.randint(nodes, (2, 5 * nodes)))
    return Trained(f"{conv.__name__}, {nodes} x {width}, {method}", model, batch)


def triples(rng):
    """Knowledge graphs: TransE, ComplEx, RotatE, DistMult."""
    kind = rng.choice(["TransE", "ComplEx", "DistMult", "RotatE"])
    sparse = rng.random() < 0.4 and kind != "RotatE"
    inner = getattr(g, kind)(300, 7, 24, sparse=sparse)

    def forward(m, head, relation, tail):
        return m.inner.loss(head, relation, tail)

    count = rng.choice([20, 500])
    batch = [torch.randint(most, (count,)) for most in (300, 7, 300)]
    trained = Trained(
        f"{kind}, {sparse}, {count}", Do(forward, inner=inner), tuple(batch)
    )
    return trained, {"optimizer": torch.optim.SparseAdam if sparse else "adam"}


# Pools and transformers of graphs ----------------------------------------------------


def pool_hierarchy(rng):
    kind = rng.choice([g.SAGPooling, g.TopKPooling, g.EdgePooling, g.PANPooling])
    width = rng.choice([16, 48])

    def forward(m, data):
        x, edges, batch, out = data.x, data.edge_index, data.batch, 0
        for conv, pool in zip(m.convs, m.pools, strict=True):
            x = conv(x, edges).relu()
            if kind is g.EdgePooling:
                x, edges, batch, _ = pool(x, edges, batch)
            else:
                x, edges, _, batch, *_ = pool(x, edges, batch=batch)
            both = [g.global_max_pool(x, batch), g.global_mean_pool(x, batch)]
            out = out + torch.cat(both, -1)
        return F.mse_loss(m.last(out).squeeze(-1), data.y)

    if kind is g.PANPooling:
        kind = g.TopKPooling
    model = Do(
        forward,
        convs=nn.ModuleList([g.GraphConv(8, width), g.GraphConv(width, width)]),
        pools=nn.ModuleList([kind(width) for _ in range(2)]),
        last=_mlp(2 * width, width, 1),
    )
    return Trained(f"{kind.__name__}, {width}", model, _graphs(rng))


def dense_hierarchy(rng):
    """DiffPool and mincut: padded graphs, soft clusters."""
    width, clusters = rng.choice([16, 32]), rng.choice([4, 12])
    kind = rng.choice(["diff", "mincut", "dmon"])
    dmon = g.DMoNPooling([width], clusters) if kind == "dmon" else nn.Identity()

    def forward(m, data):
        x, mask = to_dense_batch(data.x, data.batch)
        adjacency = to_dense_adj(data.edge_index, data.batch)
        x = m.embed(x, adjacency, mask).relu()
        if kind == "dmon":
            _, x, adjacency, *losses = m.dmon(x, adjacency, mask)
        else:
            s = m.assign(x, adjacency, mask)
            pool = g.dense_diff_pool if kind == "diff" else g.dense_mincut_pool
            x, adjacency, *losses = pool(x, adjacency, s, mask)
        x = m.after(x, adjacency).relu()
        return F.mse_loss(m.last(x.mean(1)).squeeze(-1), data.y) + sum(losses)

    model = Do(
        forward,
        embed=g.DenseSAGEConv(8, width),
        assign=g.DenseGCNConv(width, clusters),
        dmon=dmon,
        after=g.DenseGraphConv(width, width),
        last=nn.Linear(width, 1),
    )
    return Trained(f"{kind}, {width}, {clusters}", model, _graphs(rng))


def gps_with_virtual_nodes(rng):
    """GPS layers, and a node of each graph that hears and tells all."""
    width, kind = rng.choice([16, 32]), rng.choice(["multihead", "performer"])

    def forward(m, data):
        x = m.begin(data.x)
        virtual = m.virtual.expand(data.num_graphs, -1)
        for conv, mlp in zip(m.convs, m.mlps, strict=True):
            x = x + virtual[data.batch]
            x = conv(x, data.edge_index, data.batch)
            virtual = virtual + mlp(g.global_add_pool(x, data.batch))
        return F.l1_loss(m.last(virtual).squeeze(-1), data.y)

    convs = [
        g.GPSConv(width, g.GINConv(_mlp(width, width)), heads=4, attn_type=kind)
        for _ in range(2)
    ]
    model = Do(
        forward,
        begin=nn.Linear(8, width),
        virtual=_parameter(1, width),
        convs=nn.ModuleList(convs),
        mlps=nn.ModuleList(_mlp(width, width, width) for _ in range(2)),
        last=nn.Linear(width, 1),
    )
    return Trained(f"{kind}, {width}", model, _graphs(rng))


def graph_transformers(rng):
    """SGFormer, Polynormer and LINKX as PyG has them, over all nodes."""
    nodes, kind = rng.choice([40, 250]), rng.choice(["sg", "poly", "linkx", "pmlp"])
    edges = to_undirected(torch.randint(nodes, (2, 2 * nodes)))
    if kind == "sg":
        inner = g.SGFormer(8, 32, 4)
    elif kind == "poly":
        inner = g.Polynormer(8, 16, 4, local_layers=2, global_layers=1, heads=2)
    elif kind == "linkx":
        inner = g.LINKX(nodes, 8, 32, 4, 2)
    else:
        inner = g.PMLP(8, 32, 4, 3)

    def forward(m, x, edges, batch, y):
        extra = (batch,) if kind in ("sg", "poly") else ()
        args = (x,) if kind == "pmlp" else (x, edges, *extra)
        out = m.inner(*args)
        return F.cross_entropy(out, y)

    batch = (
        torch.randn(nodes, 8),
        edges,
        torch.zeros(nodes, dtype=torch.long),
        torch.randint(4, (nodes,)),
    )
    return Trained(f"{kind}, {nodes}", Do(forward, inner=inner), batch)


def knowledge_jumps(rng):
    """Jumping knowledge over layers, with a norm and dropped edges."""
    mode, width = rng.choice(["lstm", "cat", "max"]), rng.choice([16, 32])
    options = {"channels": width, "num_layers": 3} if mode == "lstm" else {}
    norm = rng.choice([g.GraphNorm, g.PairNorm, g.DiffGroupNorm, g.MeanSubtractionNorm])
    arguments = {g.DiffGroupNorm: (width, 4), g.GraphNorm: (width,)}.get(norm, ())
    norms = [norm(*arguments) for _ in range(3)]

    def forward(m, data):
        x, found = data.x, []
        for conv, norm in zip(m.convs, m.norms, strict=True):
            edges, _ = dropout_edge(data.edge_index, 0.2)
            edges, _ = add_self_loops(edges, num_nodes=len(x))
            x = norm(conv(x, edges)).relu()
            found.append(x)
        out = m.last(g.global_mean_pool(m.jump(found), data.batch))
        return F.huber_loss(out.squeeze(-1), data.y)

    model = Do(
        forward,
        convs=nn.ModuleList(
            [g.SAGEConv(8 if i == 0 else width, width) for i in range(3)]
        ),
        norms=nn.ModuleList(norms),
        jump=g.JumpingKnowledge(mode, **options),
        last=nn.Linear(3 * width if mode == "cat" else width, 1),
    )
    return Trained(f"{mode}, {norm.__name__}, {width}", model, _graphs(rng))


def adversarial_autoencoder(rng):
    """ARGVA: an encoder, and a discriminator that has an optimizer of its own."""
    nodes = rng.choice([40, 200])

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mu = g.GCNConv(8, 32), g.GCNConv(32, 16)
            self.logstd = g.GCNConv(32, 16)

        def forward(self, x, edges):
            x = self.first(x, edges).relu()
            return self.mu(x, edges), self.logstd(x, edges)

    inner = rng.choice([g.ARGVA(Encoder(), _mlp(16, 32, 1)), g.VGAE(Encoder())])

    def forward(m, x, edges):
        z = m.inner.encode(x, edges)
        loss = m.inner.recon_loss(z, edges) + m.inner.kl_loss() / nodes
        if isinstance(m.inner, g.ARGVA):
            loss = loss + m.inner.reg_loss(z) + m.inner.discriminator_loss(z)
        return loss

    batch = (torch.randn(nodes, 8), torch.randint(nodes, (2, 4 * nodes)))
    return Trained(f"{type(inner).__name__}, {nodes}", Do(forward, inner=inner), batch)


def learned_masks(rng):
    """An explainer's step: only the masks of edges and features are trained."""
    nodes = rng.choice([30, 150])
    edges = torch.randint(nodes, (2, 4 * nodes))
    conv = rng.choice([g.GCNConv, g.GraphConv])
    first, second = conv(8, 32), conv(32, 4)
    for layer in (first, second):
        layer.requires_grad_(requires_grad=False)

    def forward(m, x, edges, y):
        weight, mask = m.edge_mask.sigmoid(), m.mask.sigmoid()
        h = m.second(m.first(x * mask, edges, weight).relu(), edges, weight)
        entropy = (
            -weight * (weight + 1e-15).log() - (1 - weight) * (1 - weight + 1e-15).log()
        )
        return F.cross_entropy(h, y) + 0.1 * weight.sum() + entropy.mean() + mask.mean()

    model = Do(
        forward,
        first=first,
        second=second,
        edge_mask=_parameter(edges.shape[1]),
        mask=_parameter(1, 8),
    )
    batch = (torch.randn(nodes, 8), edges, torch.randint(4, (nodes,)))
    return Trained(f"{conv.__name__}, {nodes}", model, batch)


def label_propagation(rng):
    """Labels that are masked, spread and learned from, then smoothed."""
    nodes = rng.choice([50, 300])
    inner = g.MaskLabel(4, 16)
    spread = g.LabelPropagation(rng.choice([2, 5]), 0.9)

    def forward(m, x, edges, y):
        train = torch.rand(nodes) < 0.6
        hidden = m.inner(m.begin(x), y, train)
        hidden = m.conv(hidden, edges)
        soft = m.spread(y, edges, mask=train)
        chosen = ~train
        out = hidden[chosen] + soft[chosen]
        return F.nll_loss(out.log_softmax(-1), y[chosen])

    model = Do(
        forward,
        inner=inner,
        begin=nn.Linear(8, 16),
        conv=g.TAGConv(16, 4),
        spread=spread,
    )
    batch = (
        torch.randn(nodes, 8),
        torch.randint(nodes, (2, 4 * nodes)),
        torch.randint(4, (nodes,)),
    )
    return Trained(f"{nodes}", model, batch)


def walk_embeddings(rng):
    """Walks by hand over compressed neighbours, and skip-grams with opposites."""
    nodes, sparse = rng.choice([60, 400]), rng.random() < 0.5
    source, target = torch.randint(nodes, (2, 6 * nodes)).sort(0).values
    degree = torch.bincount(source, minlength=nodes)
    start = degree.cumsum(0) - degree

    def forward(m, begin):
        walk = [begin]
        for _ in range(5):
            now = walk[-1]
            step = (torch.rand(len(now)) * m.degree[now]).long()
            step = torch.minimum(step, (m.degree[now] - 1).clamp(min=0))
            following = m.target[(m.start[now] + step).clamp(max=len(m.target) - 1)]
            walk.append(torch.where(m.degree[now] > 0, following, now))
        walk = torch.stack(walk, 1)
        h = m.table(walk)
        wrong = m.table(torch.randint(nodes, walk.shape))
        good = (h[:, :1] * h[:, 1:]).sum(-1)
        bad = (h[:, :1] * wrong).sum(-1)
        return -F.logsigmoid(good).mean() - F.logsigmoid(-bad).mean()

    model = Do(
        forward,
        table=nn.Embedding(nodes, 32, sparse=sparse),
        degree=degree,
        start=start,
        target=target,
    )
    trained = Trained(f"{nodes}, {sparse}", model, torch.randint(nodes, (64,)))
    return trained, {"optimizer": torch.optim.SparseAdam if sparse else "adamw"}


# Clouds of points --------------------------------------------------------------------


def _nearest(pos, batch, k):
    far = torch.cdist(pos, pos) + 1e6 * (batch[:, None] != batch[None, :])
    near = far.topk(k, largest=False).indices
    row = torch.arange(len(pos)).repeat_interleave(k)
    return torch.stack([near.flatten(), row])


def point_net(rng):
    """PointNet++: farthest points by hand, a ball around each, a net of each ball."""
    count, points = rng.choice([2, 4]), rng.choice([32, 128])
    keep = points // 4

    def forward(m, pos, y):
        chosen = torch.zeros(count, keep, dtype=torch.long)
        nearest = torch.full((count, points), torch.inf)
        for number in range(1, keep):
            last = pos.gather(1, chosen[:, number - 1, None, None].expand(-1, 1, 3))
            nearest = torch.minimum(nearest, (pos - last).square().sum(-1))
            chosen[:, number] = nearest.argmax(-1)
        centre = pos.gather(1, chosen[..., None].expand(-1, -1, 3))
        ball = torch.cdist(centre, pos).topk(8, largest=False).indices
        flat = ball.flatten(1)[..., None].expand(-1, -1, 3)
        near = pos.gather(1, flat).view(count, keep, 8, 3) - centre[:, :, None]
        h = m.local(near).amax(2)
        h = m.far(torch.cat([h, centre], -1)).amax(1)
        return F.cross_entropy(m.last(h), y)

    model = Do(
        forward, local=_mlp(3, 32, 64), far=_mlp(67, 64, 128), last=nn.Linear(128, 5)
    )
    batch = (torch.randn(count, points, 3), torch.randint(5, (count,)))
    return Trained(f"{count} x {points}", model, batch)


def dynamic_neighbours(rng):
    """DGCNN: the neighbours are found anew among the features of each layer."""
    points, k = rng.choice([40, 150]), rng.choice([4, 10])
    kind = rng.choice(["edge", "gravnet", "point"])

    def forward(m, pos, batch, y):
        h = pos
        for layer in m.layers:
            edges = _nearest(h, batch, k)
            message = layer(torch.cat([h[edges[1]], h[edges[0]] - h[edges[1]]], -1))
            h = scatter(message, edges[1], 0, len(h), "max")
        if kind == "point":
            weight = softmax(m.weigh(h).squeeze(-1), batch)
            h = h * weight[:, None]
        return F.cross_entropy(m.last(g.global_max_pool(h, batch)), y)

    model = Do(
        forward,
        layers=nn.ModuleList([_mlp(6, 32), _mlp(64, 64)]),
        weigh=nn.Linear(64, 1),
        last=nn.Linear(64, 5),
    )
    batch = torch.arange(2).repeat_interleave(points)
    pos = torch.randn(2 * points, 3)
    return Trained(f"{points}, {k}", model, (pos, batch, torch.randint(5, (2,))))


def radius_of_points(rng):
    """Neighbours within a radius: how many depends on floats."""
    points, radius = rng.choice([60, 200]), rng.choice([0.4, 1.0])

    def forward(m, pos, y):
        row, col = (torch.cdist(pos, pos) < radius).nonzero().T
        h = m.begin(pos)
        message = m.edge(torch.cat([h[col], pos[row] - pos[col]], -1))
        h = scatter(message, row, 0, len(pos), "mean")
        return F.mse_loss(m.last(h).mean(0), y)

    model = Do(
        forward,
        begin=nn.Linear(3, 32),
        edge=_mlp(35, 32, 32),
        last=nn.Linear(32, 2),
    )
    return Trained(
        f"{points}, {radius}", model, (torch.randn(points, 3), torch.randn(2))
    )


# Loops, games, memories --------------------------------------------------------------


def neural_ode(rng):
    """Runge-Kutta steps whose length is a number of Python's."""
    width, steps = rng.choice([8, 64]), rng.choice([4, 12])
    kind = rng.choice(["rk4", "heun", "midpoint"])

    def forward(m, x, y):
        h, dt = m.begin(x), 1 / steps
        for number in range(steps):
            t = torch.full_like(h[:, :1], number * dt)

            def f(h, t=t):
                return m.field(torch.cat([h, t], -1))

            k1 = f(h)
            k2 = f(h + dt / 2 * k1)
            if kind == "rk4":
                k3 = f(h + dt / 2 * k2)
                k4 = f(h + dt * k3)
                h = h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            elif kind == "heun":
                h = h + dt / 2 * (k1 + f(h + dt * k1))
            else:
                h = h + dt * k2
        return F.mse_loss(m.last(h), y)

    model = Do(
        forward,
        begin=nn.Linear(4, width),
        field=_mlp(width + 1, 2 * width, width),
        last=nn.Linear(width, 2),
    )
    rows = rng.choice([30, 400])
    return Trained(
        f"{kind}, {width} x {steps}",
        model,
        (torch.randn(rows, 4), torch.randn(rows, 2)),
    )


def adaptive_steps(rng):
    """A solver that halves its step until its error is small."""
    width, rows = rng.choice([8, 32]), rng.choice([20, 300])

    def forward(m, x):
        t, dt, h, rounds = 0.0, 0.5, x, 0
        while t < 1 and rounds < 12:
            rounds += 1
            k1 = m.field(h)
            k2 = m.field(h + dt * k1)
            error = (dt * (k2 - k1) / 2).abs().max()
            if error < 0.05 or dt < 0.1:
                h, t = h + dt * (k1 + k2) / 2, t + dt
            else:
                dt = dt / 2
        return h.square().mean()

    model = Do(forward, field=_mlp(width, width, width))
    return Trained(f"{rows} x {width}", model, torch.randn(rows, width))


def fixed_point(rng):
    """Deep equilibrium: iterate without a graph, then one step with it and a hook."""
    width, rows = rng.choice([16, 64]), rng.choice([20, 300])
    waits = rng.random() < 0.5

    def forward(m, x):
        with torch.no_grad():
            z = torch.zeros(rows, width)
            for _ in range(15):
                new = torch.tanh(m.layer(z) + m.inject(x))
                if waits and (new - z).norm() < 1e-3 * new.norm():
                    break
                z = new
        z = torch.tanh(m.layer(z) + m.inject(x))
        start = z.detach().requires_grad_()
        again = torch.tanh(m.layer(start) + m.inject(x))

        def backward(gradient):
            total = gradient
            for _ in range(5):
                more = torch.autograd.grad(again, start, total, retain_graph=True)[0]
                total = gradient + more
            return total

        z.register_hook(backward)
        return m.last(z).square().mean()

    model = Do(
        forward,
        layer=nn.Linear(width, width),
        inject=nn.Linear(6, width),
        last=nn.Linear(width, 2),
    )
    return Trained(f"{rows} x {width}, waits {waits}", model, torch.randn(rows, 6))


def two_optimizers(rng):
    """A GAN: the discriminator is updated inside the step, the generator behind it."""
    width, rows = rng.choice([16, 64]), rng.choice([16, 128])
    kind = rng.choice(["hinge", "wasserstein", "non-saturating"])
    critic = _mlp(12, width, width, 1)
    update = torch.optim.Adam(critic.parameters(), 1e-4, (0.5, 0.9))

    def forward(m, real):
        critic, update = m.critic, m.update
        fake = m.generator(torch.randn(rows, 8))
        update.zero_grad()
        good, bad = critic(real), critic(fake.detach())
        if kind == "hinge":
            loss = F.relu(1 - good).mean() + F.relu(1 + bad).mean()
        elif kind == "wasserstein":
            share = torch.rand(rows, 1)
            mixed = (share * real + (1 - share) * fake.detach()).requires_grad_()
            slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[
                0
            ]
            loss = (
                bad.mean() - good.mean() + 10 * (slope.norm(dim=1) - 1).square().mean()
            )
        else:
            loss = F.softplus(-good).mean() + F.softplus(bad).mean()
        loss.backward()
        update.step()
        return -critic(fake).mean()

    model = Do(forward, generator=_mlp(8, width, width, 12), critic=critic)
    model.update = update
    return Trained(f"{kind}, {rows} x {width}", model, torch.randn(rows, 12))


def queue_of_keys(rng):
    """MoCo: a slow copy, a queue that is written to, and logits over both."""
    width, rows, length = rng.choice([16, 64]), rng.choice([8, 64]), 256
    encoder = _mlp(20, width, width)
    slow = copy.deepcopy(encoder).requires_grad_(requires_grad=False)

    def forward(m, a, b):
        with torch.no_grad():
            for p, q in zip(m.encoder.parameters(), m.slow.parameters(), strict=True):
                q.lerp_(p, 0.01)
            key = F.normalize(m.slow(b), dim=-1)
        query = F.normalize(m.encoder(a), dim=-1)
        good = (query * key).sum(-1, keepdim=True)
        scores = torch.cat([good, query @ m.queue.clone().T], 1) / 0.07
        at = int(m.at)
        m.queue[at : at + rows] = key
        m.at.fill_((at + rows) % length)
        return F.cross_entropy(scores, torch.zeros(rows, dtype=torch.long))

    model = Do(
        forward,
        encoder=encoder,
        slow=slow,
        queue=F.normalize(torch.randn(length, width), dim=-1),
        at=torch.zeros((), dtype=torch.long),
    )
    batch = (torch.randn(rows, 20), torch.randn(rows, 20))
    return Trained(f"{rows} x {width}", model, batch)


def inner_loops(rng):
    """MAML over tasks by vmap, with functional_call."""
    width, tasks, steps = rng.choice([8, 40]), rng.choice([2, 6]), rng.choice([1, 3])
    first_order = rng.random() < 0.3
    net = _mlp(3, width, width, 1)

    def forward(m, x, y):
        start = dict(m.net.named_parameters())

        def loss_of(weights, x, y):
            return F.mse_loss(functional_call(m.net, weights, (x,)), y)

        def task(x, y):
            weights = start
            for _ in range(steps):
                slope = grad(loss_of)(weights, x, y)
                if first_order:
                    slope = {key: value.detach() for key, value in slope.items()}
                weights = {key: weights[key] - 0.1 * slope[key] for key in weights}
            return loss_of(weights, x, y)

        return vmap(task)(x, y).mean()

    batch = (torch.randn(tasks, 15, 3), torch.randn(tasks, 15, 1))
    words = f"{tasks} x {width}, {steps} steps, first order {first_order}"
    return Trained(words, Do(forward, net=net), batch)


def gradients_of_samples(rng):
    """Gradients of each sample, clipped and made noisy, in place of backward's."""
    width, rows = rng.choice([16, 64]), rng.choice([8, 60])
    net = nn.Sequential(nn.Linear(10, width), nn.LayerNorm(width), nn.Linear(width, 3))

    def forward(m, x, y):
        weights = {key: value.detach() for key, value in m.net.named_parameters()}

        def loss_of(weights, x, y):
            out = functional_call(m.net, weights, (x[None],))
            return F.cross_entropy(out, y[None])

        slopes = vmap(grad(loss_of), (None, 0, 0), randomness="different")(
            weights, x, y
        )
        norms = torch.stack([s.flatten(1).norm(dim=1) for s in slopes.values()]).norm(
            dim=0
        )
        share = (1 / (norms + 1e-6)).clamp(max=1)
        total = 0
        for key, value in m.net.named_parameters():
            clipped = torch.einsum("b,b...->...", share, slopes[key]) / rows
            clipped = clipped + 0.1 * torch.randn_like(clipped)
            total = total + (value * clipped).sum()
        return total

    batch = (torch.randn(rows, 10), torch.randint(3, (rows,)))
    return Trained(f"{rows} x {width}", Do(forward, net=net), batch)


# Recurrences, volumes, densities -----------------------------------------------------


def attended_decoder(rng):
    """A packed encoder, and cells that attend and are taught by force."""
    width, count, kind = (
        rng.choice([16, 48]),
        rng.choice([3, 16]),
        rng.choice(["lstm", "gru"]),
    )
    encoder = (nn.LSTM if kind == "lstm" else nn.GRU)(16, width, bidirectional=True)

    def forward(m, words, lengths, target):
        packed = rnn.pack_padded_sequence(
            m.table(words), lengths, batch_first=False, enforce_sorted=False
        )
        keys, _ = rnn.pad_packed_sequence(m.encoder(packed)[0])
        mask = torch.arange(len(keys))[:, None] >= lengths
        h = torch.zeros(count, width)
        memory, scores = torch.zeros(count, width), []
        for now in target[:-1]:
            energy = m.energy(torch.tanh(m.key(keys) + m.query(h))).squeeze(-1)
            weight = energy.masked_fill(mask, -1e9).softmax(0)
            context = (weight[..., None] * keys).sum(0)
            h, memory = m.cell(torch.cat([m.table(now), context], -1), (h, memory))
            scores.append(m.last(h))
        return F.cross_entropy(
            torch.stack(scores).flatten(0, 1), target[1:].flatten(), ignore_index=0
        )

    model = Do(
        forward,
        table=nn.Embedding(50, 16, padding_idx=0),
        encoder=encoder,
        key=nn.Linear(2 * width, width),
        query=nn.Linear(width, width),
        energy=nn.Linear(width, 1),
        cell=nn.LSTMCell(16 + 2 * width, width),
        last=nn.Linear(width, 50),
    )
    lengths = torch.randint(2, 11, (count,))
    lengths[0] = 10
    batch = (
        torch.randint(1, 50, (10, count)),
        lengths,
        torch.randint(0, 50, (7, count)),
    )
    return Trained(f"{kind}, {count} x {width}", model, batch)


def volumes(rng):
    """A 3-D U-Net with instance norms and a Dice loss."""
    width, size = rng.choice([4, 12]), rng.choice([8, 16])

    def block(inputs, outputs):
        return nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.01, inplace=True),
        )

    def forward(m, x, y):
        a = m.a(x)
        b = m.b(F.max_pool3d(a, 2))
        c = m.c(m.down(b))
        b = m.d(torch.cat([m.up(c), b], 1))
        b = F.interpolate(b, scale_factor=2, mode="trilinear", align_corners=False)
        out = m.last(m.e(torch.cat([b, a], 1))).softmax(1)
        truth = F.one_hot(y, 3).movedim(-1, 1).to(out.dtype)
        both = (out * truth).sum((2, 3, 4))
        dice = 1 - (2 * both / ((out + truth).sum((2, 3, 4)) + 1e-5)).mean()
        return dice + F.nll_loss((out + 1e-6).log(), y)

    model = Do(
        forward,
        a=block(1, width),
        b=block(width, 2 * width),
        down=nn.Conv3d(2 * width, 2 * width, 2, 2),
        c=block(2 * width, 4 * width),
        up=nn.ConvTranspose3d(4 * width, 2 * width, 2, 2),
        d=block(4 * width, 2 * width),
        e=block(3 * width, width),
        last=nn.Conv3d(width, 3, 1),
    )
    x = torch.randn(2, 1, size, size, size)
    y = torch.randint(3, (2, size, size, size))
    return Trained(f"{width}, {size}^3", model, (x, y))


def coupled_flow(rng):
    """RealNVP with learned permutations, actnorms and log-determinants."""
    width, rows, blocks = rng.choice([8, 48]), rng.choice([30, 300]), rng.choice([2, 5])

    def forward(m, x):
        z, total = x, torch.zeros(rows)
        for net, scale, shift, mix in zip(
            m.nets, m.scales, m.shifts, m.mixes, strict=True
        ):
            z = (z + shift) * scale.exp()
            total = total + scale.sum()
            z = z @ mix
            total = total + torch.linalg.slogdet(mix)[1]
            a, b = z.chunk(2, -1)
            s, t = net(a).chunk(2, -1)
            s = torch.tanh(s)
            z, total = torch.cat([a, b * s.exp() + t], -1), total + s.sum(-1)
        return (0.5 * z.square().sum(-1) - total).mean()

    model = Do(
        forward,
        nets=nn.ModuleList(_mlp(4, width, 8) for _ in range(blocks)),
        scales=nn.ParameterList(_parameter(8) for _ in range(blocks)),
        shifts=nn.ParameterList(_parameter(8) for _ in range(blocks)),
        mixes=nn.ParameterList(
            nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0]) for _ in range(blocks)
        ),
    )
    return Trained(f"{rows} x {width}, {blocks}", model, torch.randn(rows, 8))


def denoiser(rng):
    """Diffusion with a schedule of buffers, and an average that follows the weights."""
    width, size = rng.choice([8, 24]), rng.choice([8, 16])
    predicts = rng.choice(["noise", "velocity"])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.begin, self.time = nn.Conv2d(3, width, 3, 1, 1), nn.Linear(16, width)
            self.norm, self.middle = (
                nn.GroupNorm(4, width),
                nn.Conv2d(width, width, 3, 1, 1),
            )
            self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
            self.last = nn.Conv2d(width, 3, 3, 1, 1)

        def forward(self, x, t):
            wave = torch.exp(-torch.arange(8) * 0.5) * t[:, None]
            now = self.time(torch.cat([wave.sin(), wave.cos()], -1))
            h = self.begin(x)
            h = h + self.middle(F.silu(self.norm(h))) + now[..., None, None]
            rows = h.flatten(2).mT
            h = h + self.attend(rows, rows, rows)[0].mT.unflatten(2, h.shape[2:])
            return self.last(F.silu(h))

    net = Net()
    average = copy.deepcopy(net).requires_grad_(requires_grad=False)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)

    def forward(m, x):
        with torch.no_grad():
            for p, q in zip(m.net.parameters(), m.average.parameters(), strict=True):
                q.mul_(0.999).add_(p, alpha=0.001)
        t = torch.randint(100, (len(x),))
        alpha = m.alphas[t][:, None, None, None]
        noise = torch.randn_like(x)
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        aim = (
            noise
            if predicts == "noise"
            else alpha.sqrt() * noise - (1 - alpha).sqrt() * x
        )
        loss = F.mse_loss(m.net(noisy, t.float()), aim, reduction="none").mean(
            (1, 2, 3)
        )
        weight = torch.minimum(alpha / (1 - alpha), torch.tensor(5.0)).flatten()
        return (weight * loss).mean()

    model = Do(forward, net=net, average=average, alphas=alphas)
    return Trained(f"{width}, {size}, {predicts}", model, torch.randn(3, 3, size, size))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        q = (x / scale).round()
        inside = q.abs() <= 7
        ctx.save_for_backward(x, scale, inside)
        return q.clamp(-7, 7) * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale, inside = ctx.saved_tensors
        error = torch.where(
            inside, (x / scale).round() - x / scale, (x / scale).sign() * 7
        )
        return gradient * inside, (gradient * error).sum().view_as(scale)


def fake_quantised(rng):
    """Steps learned for weights and activations, by torch's operators or by hand."""
    kind, width = rng.choice(["lsq", "torch", "straight through"]), rng.choice([16, 96])

    def quantise(x, scale):
        if kind == "lsq":
            return _Round.apply(x, scale.abs() + 1e-4)
        if kind == "torch":
            zero = torch.zeros(1)
            return torch._fake_quantize_learnable_per_tensor_affine(
                x, scale.abs() + 1e-3, zero, -8, 7, 1.0
            )
        q = (x / 0.1).round().clamp(-8, 7) * 0.1
        return x + (q - x).detach()

    def forward(m, x, y):
        h = x
        for number, layer in enumerate(m.layers):
            weight = quantise(layer.weight, m.scales[2 * number])
            h = quantise(F.relu(h), m.scales[2 * number + 1])
            h = F.linear(h, weight, layer.bias)
        return F.cross_entropy(h, y)

    widths = [10, width, width, 4]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    scales = nn.ParameterList(nn.Parameter(torch.full((1,), 0.1)) for _ in range(6))
    model = Do(forward, layers=nn.ModuleList(layers), scales=scales)
    rows = rng.choice([20, 400])
    batch = (torch.randn(rows, 10), torch.randint(4, (rows,)))
    return Trained(f"{kind}, {rows} x {width}", model, batch)


def fourier_layers(rng):
    """Complex weights on a few modes of two axes, and a loss in the spectrum."""
    width, size, modes = rng.choice([4, 16]), rng.choice([8, 32]), 4

    def forward(m, x):
        h = m.begin(x.movedim(1, -1)).movedim(-1, 1)
        for weight, skip in zip(m.weights, m.skips, strict=True):
            spectrum = torch.fft.rfft2(h, norm="ortho")
            out = torch.zeros(*spectrum.shape, dtype=torch.cfloat)
            low = spectrum[:, :, :modes, :modes]
            out[:, :, :modes, :modes] = torch.einsum("bixy,ioxy->boxy", low, weight)
            h = F.gelu(torch.fft.irfft2(out, s=(size, size), norm="ortho") + skip(h))
        return torch.fft.fft2(m.last(h)).abs().log1p().mean()

    model = Do(
        forward,
        begin=nn.Linear(2, width),
        weights=nn.ParameterList(
            nn.Parameter(torch.randn(width, width, modes, modes, dtype=torch.cfloat))
            for _ in range(3)
        ),
        skips=nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(3)),
        last=nn.Conv2d(width, 1, 1),
    )
    return Trained(f"{width}, {size}", model, torch.randn(3, 2, size, size))


def spectrograms(rng):
    """STFT and its inverse with a mask, and losses at several resolutions."""
    length, width = rng.choice([1000, 4000]), rng.choice([16, 48])

    def forward(m, x):
        window = torch.hann_window(128)
        z = torch.stft(x, 128, 64, window=window, return_complex=True)
        mask = m.net(z.abs().mT).mT.sigmoid()
        out = torch.istft(z * mask, 128, 64, window=window, length=length)
        loss = F.l1_loss(out, x)
        for size in (64, 256):
            a, b = (
                torch.stft(
                    s,
                    size,
                    size // 4,
                    window=torch.hann_window(size),
                    return_complex=True,
                ).abs()
                for s in (out, x)
            )
            loss = (
                loss
                + (a - b).norm() / b.norm()
                + F.l1_loss((a + 1e-5).log(), (b + 1e-5).log())
            )
        return loss

    model = Do(forward, net=_mlp(65, width, 65))
    return Trained(f"{length}, {width}", model, torch.randn(3, length))


def sparse_tables(rng):
    """DLRM: bags of ids, dot products of all pairs, sparse gradients."""
    tables, rows = rng.choice([2, 6]), rng.choice([16, 200])
    mode = rng.choice(["sum", "mean"])

    def forward(m, dense, ids, offsets, y):
        found = [m.bottom(dense)]
        found += [
            table(i, o) for table, i, o in zip(m.tables, ids, offsets, strict=True)
        ]
        stack = torch.stack(found, 1)
        pairs = stack @ stack.mT
        a, b = torch.triu_indices(len(found), len(found), 1)
        top = m.top(torch.cat([found[0], pairs[:, a, b]], -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(top, y)

    counts = [torch.randint(0, 5, (rows,)) for _ in range(tables)]
    ids = [torch.randint(500, (int(c.sum()),)) for c in counts]
    offsets = [c.cumsum(0) - c for c in counts]
    model = Do(
        forward,
        bottom=_mlp(6, 32, 16),
        tables=nn.ModuleList(
            nn.EmbeddingBag(500, 16, mode=mode, sparse=True) for _ in range(tables)
        ),
        top=_mlp(16 + (tables + 1) * tables // 2, 32, 1),
    )
    trained = Trained(
        f"{tables} x {rows}, {mode}",
        model,
        (torch.randn(rows, 6), ids, offsets, torch.rand(rows).round()),
    )
    return trained, {"optimizer": rng.choice(["sgd", "adagrad"])}


def mixture_density(rng):
    """Mixtures from torch.distributions behind a recurrent network."""
    width, parts, rows = rng.choice([16, 48]), rng.choice([3, 10]), rng.choice([4, 24])
    d = torch.distributions

    def forward(m, x):
        h, _ = m.cell(x[:, :-1])
        weight, mean, scale = m.last(h).unflatten(-1, (parts, 5)).split([1, 2, 2], -1)
        each = d.Independent(d.Normal(mean, F.softplus(scale) + 1e-3), 1)
        mixture = d.MixtureSameFamily(d.Categorical(logits=weight.squeeze(-1)), each)
        return -mixture.log_prob(x[:, 1:]).mean()

    model = Do(
        forward,
        cell=nn.GRU(2, width, batch_first=True),
        last=nn.Linear(width, parts * 5),
    )
    return Trained(f"{rows}, {width}, {parts}", model, torch.randn(rows, 15, 2))


def connectionist(rng):
    """CTC behind convolutions and a recurrence, with lengths of both sides."""
    width, count, steps = (
        rng.choice([16, 48]),
        rng.choice([2, 12]),
        rng.choice([30, 80]),
    )
    zero = rng.random() < 0.5

    def forward(m, x, lengths, target, target_lengths):
        h = F.gelu(m.conv(x))
        lengths = (lengths - 1) // 2 + 1
        packed = rnn.pack_padded_sequence(h.mT, lengths, True, enforce_sorted=False)
        h, _ = rnn.pad_packed_sequence(m.cell(packed)[0], batch_first=True)
        scores = m.last(h).log_softmax(-1).movedim(1, 0)
        return F.ctc_loss(scores, target, lengths, target_lengths, zero_infinity=zero)

    model = Do(
        forward,
        conv=nn.Conv1d(10, width, 3, 2, 1),
        cell=nn.GRU(width, width, bidirectional=True, batch_first=True),
        last=nn.Linear(2 * width, 12),
    )
    lengths = torch.randint(steps - 8, steps + 1, (count,))
    lengths[0] = steps
    batch = (
        torch.randn(count, 10, steps),
        lengths,
        torch.randint(1, 12, (count, 6)),
        torch.randint(1, 7, (count,)),
    )
    return Trained(f"{count} x {steps}, {width}", model, batch)


def transduced(rng):
    """RNN-T by hand: a lattice of sums of exponentials along its diagonals."""
    count, frames, words, width = 2, rng.choice([8, 20]), rng.choice([3, 6]), 16

    def forward(m, x, y):
        a, _ = m.encoder(x)
        b, _ = m.predictor(F.pad(m.table(y), (0, 0, 1, 0)))
        joint = torch.tanh(a[:, :, None] + b[:, None])
        scores = m.last(joint).log_softmax(-1)
        blank = scores[..., 0]
        emit = scores[:, :, :-1].gather(
            3, y[:, None, :, None].expand(-1, frames, -1, 1)
        )
        emit = emit.squeeze(-1)
        row = [torch.zeros(count)]
        for u in range(words):
            row.append(row[-1] + emit[:, 0, u])
        for t in range(1, frames):
            new = [row[0] + blank[:, t - 1, 0]]
            for u in range(1, words + 1):
                stay = row[u] + blank[:, t - 1, u]
                new.append(torch.logaddexp(stay, new[-1] + emit[:, t, u - 1]))
            row = new
        return -(row[-1] + blank[:, -1, -1]).mean()

    model = Do(
        forward,
        encoder=nn.LSTM(6, width, batch_first=True),
        predictor=nn.GRU(8, width, batch_first=True),
        table=nn.Embedding(20, 8),
        last=nn.Linear(width, 20),
    )
    batch = (torch.randn(count, frames, 6), torch.randint(1, 20, (count, words)))
    return Trained(f"{frames} x {words}", model, batch)


def accumulating(rng):
    """Backward passes of slices inside the step, the last one behind it."""
    width, slices, rows = (
        rng.choice([32, 128]),
        rng.choice([2, 4]),
        rng.choice([40, 400]),
    )

    def forward(m, x, y):
        parts = list(zip(x.chunk(slices), y.chunk(slices), strict=True))
        for a, b in parts[:-1]:
            (F.cross_entropy(m.net(a), b) / slices).backward()
        a, b = parts[-1]
        return F.cross_entropy(m.net(a), b) / slices

    model = Do(forward, net=_mlp(10, width, width, 5))
    batch = (torch.randn(rows, 10), torch.randint(5, (rows,)))
    return Trained(f"{slices} x {rows}, {width}", model, batch)


def sharpness(rng):
    """SAM: climb, look again, come back."""
    width, rows = rng.choice([16, 64]), rng.choice([40, 400])

    def forward(m, x, y):
        F.cross_entropy(m.net(x), y).backward()
        parameters = list(m.net.parameters())
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            moves = [p.grad * 0.05 / (norm + 1e-9) for p in parameters]
            torch._foreach_add_(parameters, moves)
        m.net.zero_grad()
        loss = F.cross_entropy(m.net(x), y)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, moves)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        return sum((p * 0).sum() for p in parameters)

    model = Do(forward, net=_mlp(10, width, width, 5))
    return Trained(
        f"{rows} x {width}", model, (torch.randn(rows, 10), torch.randint(5, (rows,)))
    )


def gumbel_codes(rng):
    """Discrete latents with straight-through samples, and wav2vec's diversity."""
    width, groups, codes = rng.choice([16, 32]), 2, rng.choice([8, 40])

    def forward(m, x):
        scores = m.score(m.encoder(x)).unflatten(-1, (groups, codes))
        hard = F.gumbel_softmax(scores, 0.7, hard=True)
        out = torch.einsum("bngc,gcd->bngd", hard, m.book).flatten(2)
        share = scores.softmax(-1).mean((0, 1))
        variety = (share * (share + 1e-7).log()).sum(-1).exp().sum()
        return F.mse_loss(m.decoder(out), x) + 0.1 * variety / codes

    model = Do(
        forward,
        encoder=_mlp(12, width, width),
        score=nn.Linear(width, groups * codes),
        book=_parameter(groups, codes, width),
        decoder=_mlp(groups * width, width, 12),
    )
    return Trained(f"{width}, {codes}", model, torch.randn(4, 30, 12))


def triangular_attention(rng):
    """Pair representations, as in protein folding, with checkpoints."""
    width, count, saved = rng.choice([8, 16]), rng.choice([8, 24]), rng.random() < 0.5

    def block(m, pair):
        a, b = m.norm(pair), m.gate(pair).sigmoid()
        pair = pair + b * torch.einsum("ikd,jkd->ijd", m.left(a), m.right(a))
        q, k, v = m.qkv(m.norm(pair)).unflatten(-1, (3, 2, -1)).unbind(-3)
        bias = m.bias(pair).movedim(-1, 0)
        out = F.scaled_dot_product_attention(
            q.movedim(-2, 1), k.movedim(-2, 1), v.movedim(-2, 1), bias
        )
        return pair + out.movedim(1, -2).flatten(-2)

    def forward(m, x):
        pair = m.outer(x[:, None] * x[None])
        for _ in range(2):
            if saved:
                pair = torch.utils.checkpoint.checkpoint(
                    block, m, pair, use_reentrant=False
                )
            else:
                pair = block(m, pair)
        return pair.square().mean()

    model = Do(
        forward,
        outer=nn.Linear(6, width),
        norm=nn.LayerNorm(width),
        gate=nn.Linear(width, width),
        left=nn.Linear(width, width),
        right=nn.Linear(width, width),
        qkv=nn.Linear(width, 3 * width),
        bias=nn.Linear(width, 2),
    )
    return Trained(f"{count}, {width}, {saved}", model, torch.randn(count, 6))


def decision_trees(rng):
    """Soft trees and numerical embeddings for tables, with entmax-like gates."""
    rows, depth, trees = rng.choice([40, 500]), rng.choice([2, 4]), rng.choice([4, 16])

    def forward(m, x, y):
        periodic = 2 * torch.pi * m.frequency * x[..., None]
        h = torch.cat([periodic.sin(), periodic.cos()], -1).flatten(1)
        choice = m.select.softmax(0)
        gate = ((h @ choice).unflatten(-1, (trees, depth)) - m.threshold).sigmoid()
        leaves = torch.ones(rows, trees, 1)
        for level in range(depth):
            now = gate[:, :, level, None]
            leaves = torch.cat([leaves * now, leaves * (1 - now)], -1)
        out = torch.einsum("btl,tlc->bc", leaves, m.response)
        return F.cross_entropy(out, y)

    model = Do(
        forward,
        frequency=_parameter(7, 6),
        select=_parameter(84, trees * depth),
        threshold=_parameter(trees, depth),
        response=_parameter(trees, 2**depth, 3),
    )
    return Trained(
        f"{rows}, {trees} x {depth}",
        model,
        (torch.randn(rows, 7), torch.randint(3, (rows,))),
    )


def policies(rng):
    """PPO over a table of steps: advantages backwards in time, clipped ratios."""
    steps, width = rng.choice([16, 100]), rng.choice([16, 64])

    def forward(m, seen, reward, done, action, old):
        h = m.body(seen)
        value, scores = m.value(h).squeeze(-1), m.policy(h)
        with torch.no_grad():
            ahead, found = torch.zeros(reward.shape[1]), []
            for t in reversed(range(steps - 1)):
                live = 1 - done[t]
                delta = reward[t] + 0.99 * value[t + 1] * live - value[t]
                ahead = delta + 0.95 * 0.99 * live * ahead
                found.append(ahead)
            gain = torch.stack(found[::-1])
            aim = gain + value[:-1]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        chosen = torch.distributions.Categorical(logits=scores[:-1])
        ratio = (chosen.log_prob(action[:-1]) - old[:-1]).exp()
        loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        return loss + F.mse_loss(value[:-1], aim) - 0.01 * chosen.entropy().mean()

    model = Do(
        forward,
        body=_mlp(6, width, width),
        value=nn.Linear(width, 1),
        policy=nn.Linear(width, 3),
    )
    batch = (
        torch.randn(steps, 4, 6),
        torch.randn(steps, 4),
        torch.zeros(steps, 4),
        torch.randint(3, (steps, 4)),
        torch.randn(steps, 4),
    )
    return Trained(f"{steps}, {width}", model, batch)


FAMILIES = {
    function.__name__: function
    for function in (
        schnet,
        continuous_filters,
        painn,
        egnn,
        angles,
        attentive_fingerprint,
        temporal_memory,
        snapshots,
        typed_stack,
        relational,
        link_prediction,
        triples,
        pool_hierarchy,
        dense_hierarchy,
        gps_with_virtual_nodes,
        graph_transformers,
        knowledge_jumps,
        adversarial_autoencoder,
        learned_masks,
        label_propagation,
        walk_embeddings,
        point_net,
        dynamic_neighbours,
        radius_of_points,
        neural_ode,
        adaptive_steps,
        fixed_point,
        two_optimizers,
        queue_of_keys,
        inner_loops,
        gradients_of_samples,
        attended_decoder,
        volumes,
        coupled_flow,
        denoiser,
        fake_quantised,
        fourier_layers,
        spectrograms,
        sparse_tables,
        mixture_density,
        connectionist,
        transduced,
        accumulating,
        sharpness,
        gumbel_codes,
        triangular_attention,
        decision_trees,
        policies,
    )
}


def draw_family_step(seed, family):
    """Draw a step of a family; a seed always gives the same."""
    rng = random.Random(f"family {family} {seed}")
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = FAMILIES[family](rng)
    options = {}
    if isinstance(trained, tuple):
        trained, options = trained
    if "optimizer" not in options:
        name = rng.choice(sorted(OPTIMIZERS))
        if family == "fourier_layers" and name == "adamw, fused":
            name = "adamw"  # torch fuses no complex parameters
        options["optimizer"] = OPTIMIZERS[name]
    else:
        name = options["optimizer"]
    if rng.random() < 0.15 and family not in ("fourier_layers", "spectrograms"):
        options["autocast"] = torch.bfloat16
    description = f"{seed}: {family}, {trained.description}; {name}"
    description += ", autocast" if "autocast" in options else ""
    return DrawnStep(
        description,
        trained.model,
        trained.batch,
        Step(trained.loss, **options),
        rng.choice([1, 2]),
    )
