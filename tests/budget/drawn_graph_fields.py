"""Training steps on graphs: whole models of PyG, and ways of theirs to hold edges.

As ``drawn_fields.py``, these were written down before any estimate of them was seen.
"""

import itertools
import random

import torch
import torch_geometric.nn as g
from drawn import DrawnStep, Trained
from drawn_fields import OPTIMIZERS
from torch import nn
from torch.nn import functional as F  # noqa: N812 -- as everybody calls it
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import (
    scatter,
    segment,
    softmax,
    to_torch_coo_tensor,
    to_torch_csr_tensor,
    trim_to_layer,
)

from loaderkit.budget.step.train_step import Step


def _draw_graph(rng, width=16, scale=1.0):
    nodes = max(4, int(scale * rng.lognormvariate(3, 0.6)))
    edges = torch.randint(nodes, (2, nodes * rng.choice([2, 4])))
    edge_attr = torch.randn(edges.size(1), 6)
    return Data(
        x=torch.randn(nodes, width),
        z=torch.randint(20, (nodes,)),
        pos=torch.randn(nodes, 3),
        edge_index=edges,
        edge_attr=edge_attr,
        y=torch.randn(1, 1),
    )


def _draw_graphs(rng, **options):
    count = rng.choice([3, 12, 40])
    return Batch.from_data_list([_draw_graph(rng, **options) for _ in range(count)])


def _one_graph(rng):
    graph = _draw_graph(rng, scale=rng.choice([5, 30]))
    graph.y = torch.randint(4, (graph.num_nodes,))
    graph.train_mask = torch.rand(graph.num_nodes) < 0.3
    graph.train_mask[0] = True
    return graph


def _mlp(*widths):
    layers = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class _OverAdjacency(nn.Module):
    """Convolutions whose edges are a sparse matrix."""

    def __init__(self, kind, layout, width):
        super().__init__()
        self.first = kind(16, width)
        self.second = kind(width, 4)
        self.layout = layout

    def forward(self, data):
        make = to_torch_csr_tensor if self.layout == "csr" else to_torch_coo_tensor
        size = (data.num_nodes, data.num_nodes)
        near = make(data.edge_index, size=size).t()
        hidden = self.first(data.x, near).relu()
        out = self.second(hidden, near)
        return F.cross_entropy(out[data.train_mask], data.y[data.train_mask])


def adjacency(rng):
    kinds = {
        "gcn": lambda i, o: g.GCNConv(i, o),
        "sage": lambda i, o: g.SAGEConv(i, o),
        "gin": lambda i, o: g.GINConv(_mlp(i, o)),
        "sg": lambda i, o: g.SGConv(i, o, 2),
        "graph": lambda i, o: g.GraphConv(i, o),
    }
    name, layout = rng.choice(list(kinds)), rng.choice(["coo", "csr"])
    model = _OverAdjacency(kinds[name], layout, rng.choice([16, 64]))
    return Trained(f"{name}, {layout}", model, _one_graph(rng))


class _Propagated(nn.Module):
    """A fixed normalised adjacency, kept as a buffer."""

    def __init__(self, matrix, width, steps):
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.mlp, self.steps = _mlp(16, width, 4), steps

    def forward(self, x):
        hidden = start = self.mlp(x)
        for _ in range(self.steps):
            hidden = 0.9 * (self.matrix @ hidden) + 0.1 * start
        return hidden.log_softmax(1)


def propagated(rng):
    graph = _one_graph(rng)
    n = graph.num_nodes
    matrix = torch.sparse_coo_tensor(
        graph.edge_index, torch.ones(graph.num_edges) / 3, (n, n)
    ).coalesce()
    if rng.random() < 0.5:
        matrix = matrix.to_sparse_csr()
    model = _Propagated(matrix, 32, rng.randint(1, 4))
    return Trained(str(matrix.layout), model, graph.x)


class _Net(nn.Module):
    """A basic model of PyG, a readout and a head."""

    def __init__(self, inner, width, readout, *, with_edges=False):
        super().__init__()
        self.inner, self.readout, self.with_edges = inner, readout, with_edges
        self.head = nn.Linear(width, 1)

    def forward(self, data):
        options = {"edge_attr": data.edge_attr} if self.with_edges else {}
        hidden = self.inner(data.x, data.edge_index, **options)
        return F.mse_loss(self.head(self.readout(hidden, data.batch)), data.y)


def basic(rng):
    name = rng.choice(["GCN", "GraphSAGE", "GIN", "GAT", "PNA", "EdgeCNN"])
    options = {}
    if name == "PNA":
        options = {
            "aggregators": ["mean", "max", "std"],
            "scalers": ["identity", "amplification"],
            "deg": torch.ones(90, dtype=torch.long),
        }
    model_class = getattr(g.models, name)
    inner = model_class(
        16,
        32,
        rng.randint(2, 3),
        32,
        dropout=0.2,
        norm=rng.choice([None, "batch_norm", "graph_norm", "layer_norm"]),
        jk=rng.choice([None, "cat", "max", "lstm"]),
        act=rng.choice(["relu", "elu", "gelu"]),
        **options,
    )
    readout = rng.choice([g.global_mean_pool, g.global_max_pool, g.global_add_pool])
    return Trained(name, _Net(inner, 32, readout), _draw_graphs(rng))


def edges_of_attention(rng):
    name = rng.choice(["GAT", "transformer"])
    if name == "GAT":
        inner = g.models.GAT(16, 32, 2, 32, v2=True, heads=4, edge_dim=6)
    else:
        inner = g.TransformerConv(16, 8, heads=4, edge_dim=6, dropout=0.1, beta=True)
    model = _Net(inner, 32, g.global_add_pool, with_edges=True)
    return Trained(name, model, _draw_graphs(rng))


class _UNet(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = g.GraphUNet(16, 32, 8, depth, pool_ratios=0.5)

    def forward(self, data):
        return self.inner(data.x, data.edge_index, data.batch).square().mean()


def unet(rng):
    return Trained("", _UNet(rng.randint(1, 3)), _draw_graphs(rng))


class _Chain(nn.Module):
    """Pools one after the other, each with a readout."""

    def __init__(self, kind):
        super().__init__()
        self.convs = nn.ModuleList([g.GraphConv(16, 32), g.GraphConv(32, 32)])
        self.pools = nn.ModuleList(kind(32) for _ in "12")
        self.head = nn.Linear(64, 1)

    def forward(self, data):
        x, edges, batch = data.x, data.edge_index, data.batch
        total = 0
        for conv, pool in zip(self.convs, self.pools, strict=True):
            x = conv(x, edges).relu()
            x, edges, _, batch, *_ = pool(x, edges, batch=batch)
            parts = [g.global_max_pool(x, batch), g.global_mean_pool(x, batch)]
            total = total + torch.cat(parts, 1)
        return F.mse_loss(self.head(total), data.y)


def pools(rng):
    kinds = {
        "topk": lambda w: g.TopKPooling(w, 0.8),
        "sag": lambda w: g.SAGPooling(w, 0.5, GNN=g.GCNConv),
        "asap": lambda w: g.ASAPooling(w, 0.5),
    }
    name = rng.choice(list(kinds))
    return Trained(name, _Chain(kinds[name]), _draw_graphs(rng))


def fingerprint(rng):
    inner = g.models.AttentiveFP(16, 32, 32, 6, rng.randint(1, 3), 2, 0.1)

    class Fingerprint(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner
            self.head = nn.Linear(32, 1)

        def forward(self, data):
            return self.head(
                self.inner(data.x, data.edge_index, data.edge_attr, data.batch)
            )

    return Trained("", Fingerprint(), _draw_graphs(rng))


class _Autoencoder(nn.Module):
    def __init__(self, way, width):
        super().__init__()
        self.first = g.GCNConv(16, 2 * width)
        self.mean, self.spread = (
            g.GCNConv(2 * width, width),
            g.GCNConv(2 * width, width),
        )
        encoder = _Encoder(self.first, self.mean, self.spread, way)
        self.inner = g.VGAE(encoder) if way == "variational" else g.GAE(encoder)
        self.way = way

    def forward(self, data):
        z = self.inner.encode(data.x, data.edge_index)
        loss = self.inner.recon_loss(z, data.edge_index)
        if self.way == "variational":
            loss = loss + self.inner.kl_loss() / data.num_nodes
        return loss


class _Encoder(nn.Module):
    def __init__(self, first, mean, spread, way):
        super().__init__()
        self.first, self.mean, self.spread, self.way = first, mean, spread, way

    def forward(self, x, edges):
        hidden = self.first(x, edges).relu()
        if self.way == "variational":
            return self.mean(hidden, edges), self.spread(hidden, edges)
        return self.mean(hidden, edges)


def autoencoder(rng):
    way = rng.choice(["plain", "variational"])
    return Trained(way, _Autoencoder(way, rng.choice([8, 32])), _one_graph(rng))


class _Infomax(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.act = g.GCNConv(16, width), nn.PReLU(width)
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, data):
        positive = self.act(self.conv(data.x, data.edge_index))
        shuffled = data.x[torch.randperm(len(data.x))]
        negative = self.act(self.conv(shuffled, data.edge_index))
        summary = self.weight @ positive.mean(0).sigmoid()
        right = (positive @ summary).sigmoid() + 1e-15
        wrong = 1 - (negative @ summary).sigmoid() + 1e-15
        return -right.log().mean() - wrong.log().mean()


def infomax(rng):
    return Trained("", _Infomax(rng.choice([16, 64])), _one_graph(rng))


class _Walks(nn.Module):
    """Node2Vec's loss over walks that were drawn before."""

    def __init__(self, nodes, width, *, sparse):
        super().__init__()
        self.embedding = nn.Embedding(nodes, width, sparse=sparse)

    def forward(self, right, wrong):
        loss = 0
        for walks, sign in ((right, 1), (wrong, -1)):
            start, rest = walks[:, 0], walks[:, 1:].contiguous()
            first = self.embedding(start).view(len(start), 1, -1)
            others = self.embedding(rest.view(-1)).view(len(start), rest.size(1), -1)
            scores = (first * others).sum(-1).view(-1)
            loss = loss - F.logsigmoid(sign * scores).mean()
        return loss


def walks(rng):
    nodes, sparse = rng.choice([300, 20_000]), rng.random() < 0.6
    batch = torch.randint(nodes, (64, 6)), torch.randint(nodes, (64, 6))
    return Trained(f"{nodes}, sparse {sparse}", _Walks(nodes, 32, sparse=sparse), batch)


class _Knowledge(nn.Module):
    """Embeddings of a knowledge graph: a score of head, relation and tail."""

    def __init__(self, name, *, sparse):
        super().__init__()
        self.inner = getattr(g.kge, name)(2000, 11, 32, sparse=sparse)

    def forward(self, head, relation, tail):
        return self.inner.loss(head, relation, tail)


def knowledge(rng):
    name, sparse = rng.choice(["TransE", "ComplEx", "DistMult", "RotatE"]), False
    if rng.random() < 0.4:
        sparse = True
    n = rng.choice([50, 700])
    batch = (
        torch.randint(2000, (n,)),
        torch.randint(11, (n,)),
        torch.randint(2000, (n,)),
    )
    return Trained(f"{name}, sparse {sparse}", _Knowledge(name, sparse=sparse), batch)


class _Light(nn.Module):
    def __init__(self, nodes):
        super().__init__()
        self.inner = g.LightGCN(nodes, 32, 3)

    def forward(self, data):
        pairs = data.edge_index[:, : data.num_edges // 2]
        wrong = torch.stack([pairs[0], pairs[1].roll(1)])
        scores = self.inner(data.edge_index, torch.cat([pairs, wrong], 1))
        right, others = scores.chunk(2)
        return self.inner.recommendation_loss(
            right, others, node_id=data.edge_index.unique(), lambda_reg=1e-4
        )


def light(rng):
    graph = _one_graph(rng)
    return Trained("", _Light(graph.num_nodes), graph)


class _Relations(nn.Module):
    def __init__(self, way, nodes):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(nodes, 16))
        options = {"num_bases": 3} if way == "bases" else {"num_blocks": 4}
        kind = g.FastRGCNConv if way == "fast" else g.RGCNConv
        self.first = kind(16, 16, 5, **(options if way != "plain" else {}))
        self.relations = nn.Parameter(torch.randn(5, 16))

    def forward(self, edge_index, edge_type):
        z = self.first(self.embedding, edge_index, edge_type).relu()
        scores = (z[edge_index[0]] * self.relations[edge_type] * z[edge_index[1]]).sum(
            1
        )
        return F.softplus(-scores).mean()


def relations(rng):
    nodes, edges = rng.choice([50, 700]), rng.choice([200, 3000])
    batch = torch.randint(nodes, (2, edges)), torch.randint(5, (edges,))
    way = rng.choice(["bases", "blocks", "plain", "fast"])
    return Trained(way, _Relations(way, nodes), batch)


def _typed_graph(rng):
    graph = HeteroData()
    a, b = rng.choice([30, 400]), rng.choice([20, 100])
    graph["a"].x, graph["b"].x = torch.randn(a, 12), torch.randn(b, 8)
    for source, name, target in (("a", "to", "b"), ("b", "of", "a"), ("a", "in", "a")):
        edges = rng.choice([100, 1500])
        ends = [len(graph[kind].x) for kind in (source, target)]
        graph[source, name, target].edge_index = torch.stack(
            [torch.randint(end, (edges,)) for end in ends]
        )
    graph["a"].y = torch.randint(3, (a,))
    return graph


class _Typed(nn.Module):
    def __init__(self, way, metadata):
        super().__init__()
        self.first = nn.ModuleDict({"a": g.Linear(-1, 32), "b": g.Linear(-1, 32)})
        if way == "hgt":
            self.inner = g.HGTConv(32, 32, metadata, heads=2)
        elif way == "han":
            self.inner = g.HANConv(32, 32, metadata, heads=4, dropout=0.1)
        else:
            kinds = {
                "to": g.SAGEConv((32, 32), 32, aggr="lstm")
                if way == "lstm"
                else g.GATConv((32, 32), 32, add_self_loops=False),
                "of": g.SAGEConv((32, 32), 32),
                "in": g.GCNConv(32, 32),
            }
            edges = {edge: kinds[edge[1]] for edge in metadata[1]}
            self.inner = g.HeteroConv(edges, rng_aggr[way])
        self.head = nn.Linear(32, 3)

    def forward(self, data):
        x = {kind: self.first[kind](x).relu() for kind, x in data.x_dict.items()}
        edges = data.edge_index_dict
        # Aggregation by an LSTM needs edges in the order of their targets.
        edges = {k: e[:, e[1].argsort()] for k, e in edges.items()}
        return F.cross_entropy(self.head(self.inner(x, edges)["a"]), data["a"].y)


rng_aggr = {"sum": "sum", "cat": "max", "lstm": "mean", "gat": "min"}


def typed(rng):
    way, graph = rng.choice(["hgt", "han", "sum", "cat", "lstm"]), _typed_graph(rng)
    model = _Typed(way, graph.metadata())
    with torch.no_grad():
        model(graph)
    return Trained(way, model, graph)


def to_hetero(rng):
    graph = _typed_graph(rng)

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = g.SAGEConv((-1, -1), 24), g.SAGEConv((-1, -1), 3)

        def forward(self, x, edge_index):
            return self.b(self.a(x, edge_index).relu(), edge_index)

    model = g.to_hetero(Inner(), graph.metadata(), aggr="sum")
    with torch.no_grad():
        model(graph.x_dict, graph.edge_index_dict)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, data):
            return self.inner(data.x_dict, data.edge_index_dict)["a"]

    return Trained("", Outer(), graph)


class _Equivariant(nn.Module):
    """Messages from distances; positions move along the edges."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.edge = _mlp(2 * width + 1, width, width)
        self.move, self.node = _mlp(width, width, 1), _mlp(2 * width, width, width)

    def forward(self, data):
        h, pos = self.first(data.x), data.pos
        i, j = data.edge_index
        for _ in range(2):
            apart = pos[i] - pos[j]
            near = apart.square().sum(1, keepdim=True)
            messages = self.edge(torch.cat([h[i], h[j], near], 1))
            shift = apart / (near.sqrt() + 1) * self.move(messages)
            pos = pos + scatter(shift, i, dim_size=len(h), reduce="mean")
            total = scatter(messages, i, dim_size=len(h), reduce="sum")
            h = h + self.node(torch.cat([h, total], 1))
        return F.l1_loss(pos, data.pos.roll(1, 0)) + h.square().mean()


def equivariant(rng):
    return Trained("", _Equivariant(rng.choice([16, 48])), _draw_graphs(rng))


class _VirtualNode(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.table, self.edges = nn.Embedding(20, width), nn.Linear(6, width)
        self.virtual = nn.Embedding(1, width)
        self.convs = nn.ModuleList(
            g.GINEConv(_mlp(width, 2 * width, width)) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))
        self.mlp = _mlp(width, 2 * width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, data):
        h, e = self.table(data.z), self.edges(data.edge_attr)
        node = self.virtual(torch.zeros(data.num_graphs, dtype=torch.long))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            h = h + node[data.batch]
            out = F.dropout(
                norm(conv(h, data.edge_index, e)).relu(), 0.3, self.training
            )
            node = node + self.mlp(g.global_add_pool(h, data.batch) + node)
            h = h + out
        return F.mse_loss(self.head(g.global_mean_pool(h, data.batch)), data.y)


def virtual_node(rng):
    return Trained("", _VirtualNode(32, rng.randint(1, 3)), _draw_graphs(rng))


class _Sampled(nn.Module):
    """Layers that need fewer nodes each, as after neighbour sampling."""

    def __init__(self, kind):
        super().__init__()
        self.convs = nn.ModuleList([kind(16, 32), kind(32, 4)])

    def forward(self, data):
        x, edges = data.x, data.edge_index
        for number, conv in enumerate(self.convs):
            x, edges, _ = trim_to_layer(number, [20, 60, 200], [80, 300], x, edges)
            x = conv(x, edges)
        return x[:20]


def sampled(rng):
    # From 60 neighbours to 20 seeds, and from 200 neighbours of theirs.
    hops = [((20, 80), (0, 20), 80), ((80, 280), (20, 80), 300)]
    edges = [
        torch.stack([torch.randint(*source, (n,)), torch.randint(*target, (n,))])
        for source, target, n in hops
    ]
    data = Data(x=torch.randn(280, 16), edge_index=torch.cat(edges, 1))
    kind = rng.choice([g.SAGEConv, g.GATConv, g.GraphConv])
    return Trained(kind.__name__, _Sampled(kind), data)


class _SortPool(nn.Module):
    """The largest nodes of each graph as a series, through convolutions."""

    def __init__(self, k):
        super().__init__()
        self.convs = nn.ModuleList([g.GCNConv(16, 32), g.GCNConv(32, 32)])
        self.last, self.pool = g.GCNConv(32, 1), g.SortAggregation(k)
        self.conv1, self.conv2 = nn.Conv1d(1, 16, 65, 65), nn.Conv1d(16, 32, 3)
        self.head = nn.Linear(32 * (k - 2), 1)

    def forward(self, data):
        x, hidden = data.x, []
        for conv in [*self.convs, self.last]:
            x = conv(x, data.edge_index).tanh()
            hidden.append(x)
        x = self.pool(torch.cat(hidden, 1), data.batch)[:, None]
        return self.head(self.conv2(self.conv1(x).relu()).relu().flatten(1))


def sort_pool(rng):
    return Trained("", _SortPool(rng.choice([6, 20])), _draw_graphs(rng))


class _Segmented(nn.Module):
    """Sums over sorted edges by their borders, and a softmax by hand."""

    def __init__(self, reduce):
        super().__init__()
        self.first, self.score = nn.Linear(16, 32), nn.Linear(32, 1)
        self.reduce = reduce

    def forward(self, data):
        h = self.first(data.x)
        shares = softmax(self.score(h), data.batch)
        return segment(h * shares, data.ptr, reduce=self.reduce)


def segmented(rng):
    reduce = rng.choice(["sum", "mean", "max", "min"])
    return Trained(reduce, _Segmented(reduce), _draw_graphs(rng))


def linkx(rng):
    graph = _one_graph(rng)
    inner = g.models.LINKX(graph.num_nodes, 16, 32, 4, rng.randint(1, 2))
    return Trained("", inner, (graph.x, graph.edge_index))


def reversible(rng):
    blocks = nn.ModuleList(g.SAGEConv(8, 8) for _ in range(2))
    inner = g.GroupAddRev(blocks)

    class Reversible(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = nn.Linear(16, 16), inner

        def forward(self, data):
            return self.inner(self.first(data.x), data.edge_index)

    return Trained("", Reversible(), _one_graph(rng))


def transformers_of_nodes(rng):
    name = rng.choice(["SGFormer", "Polynormer"])
    kind = getattr(g.models, name)
    inner = kind(16, 32, 4)

    class OfNodes(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, data):
            return self.inner(data.x, data.edge_index, data.batch)

    return Trained(name, OfNodes(), _draw_graphs(rng))


class _Dense(nn.Module):
    """Graphs as dense matrices, padded before: no sizes decide anything."""

    def __init__(self, kind, width):
        super().__init__()
        self.first, self.second = kind(16, width), kind(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x, near, mask):
        x = self.first(x, near, mask).relu()
        x = self.norm(x.flatten(0, 1)).view_as(x)
        x = self.second(x, near, mask)
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def dense(rng):
    n, nodes = rng.randint(2, 8), rng.choice([10, 40])
    kinds = {
        "gcn": g.DenseGCNConv,
        "sage": g.DenseSAGEConv,
        "gat": g.DenseGATConv,
        "graph": g.DenseGraphConv,
        "gin": lambda i, o: g.DenseGINConv(_mlp(i, o)),
    }
    name = rng.choice(list(kinds))
    near = (torch.rand(n, nodes, nodes) < 0.2).float()
    mask = torch.rand(n, nodes) < 0.8
    mask[:, 0] = True
    batch = torch.randn(n, nodes, 16), near, mask
    return Trained(name, _Dense(kinds[name], 32), batch)


class _Explained(nn.Module):
    """A mask over edges that is learnt, thrown by chance."""

    def __init__(self):
        super().__init__()
        self.conv, self.mask = g.GCNConv(16, 32), _mlp(64, 32, 1)

    def forward(self, data):
        h = self.conv(data.x, data.edge_index).relu()
        scores = self.mask(h[data.edge_index].transpose(0, 1).flatten(1))[:, 0]
        noise = torch.rand_like(scores).clamp(1e-4, 1 - 1e-4)
        gates = ((noise.logit() + scores) / 0.5).sigmoid()
        kept = gates > 0.5
        edges = data.edge_index[:, kept]
        return self.conv(data.x, edges, gates[kept]).mean() + gates.mean()


def explained(rng):
    return Trained("", _Explained(), _one_graph(rng))


class _Set2Set(nn.Module):
    """Message passing with a network of the edges and a GRU, read out by a set."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(16, width)
        edges = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, width**2))
        self.conv = g.NNConv(width, width, edges, aggr="mean")
        self.gru = nn.GRU(width, width)
        self.set2set = g.Set2Set(width, 3)
        self.head = nn.Linear(2 * width, 1)

    def forward(self, data):
        out = self.first(data.x).relu()
        h = out[None]
        for _ in range(3):
            m = self.conv(out, data.edge_index, data.edge_attr).relu()
            out, h = self.gru(m[None], h)
            out = out[0]
        return F.mse_loss(self.head(self.set2set(out, data.batch)), data.y)


def set_to_set(rng):
    return Trained("", _Set2Set(16), _draw_graphs(rng))


KINDS = {
    kind.__name__: kind
    for kind in (
        adjacency,
        propagated,
        basic,
        edges_of_attention,
        unet,
        pools,
        fingerprint,
        autoencoder,
        infomax,
        walks,
        knowledge,
        light,
        relations,
        typed,
        to_hetero,
        equivariant,
        virtual_node,
        sampled,
        sort_pool,
        segmented,
        linkx,
        reversible,
        transformers_of_nodes,
        dense,
        explained,
        set_to_set,
    )
}


def draw_graph_field_step(seed, kind):
    """Draw a step of a kind; a seed always gives the same."""
    rng = random.Random(f"graph fields {kind} {seed}")
    torch.manual_seed(seed)
    trained = KINDS[kind](rng)
    optimizers = dict(OPTIMIZERS)
    if any(getattr(module, "sparse", False) for module in trained.model.modules()):
        # Other optimizers refuse sparse gradients.
        optimizers = {
            "sgd": torch.optim.SGD,
            "sparse adam": torch.optim.SparseAdam,
            "adagrad": torch.optim.Adagrad,
            "none": None,
        }
    name = rng.choice(list(optimizers))
    autocast = torch.bfloat16 if rng.random() < 0.1 else None
    step = Step(trained.loss, optimizer=optimizers[name], autocast=autocast)
    words = f"{kind} {seed}: {trained.description}; {name}; {autocast}"
    return DrawnStep(words, trained.model, trained.batch, step, rng.choice([1, 2]))
