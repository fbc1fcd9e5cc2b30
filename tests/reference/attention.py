"""Two-stream relative attention as the papers write it: a loop over queries and keys, positions by plain trigonometry."""

import math

import torch


def sinusoid(distance: float, width: int) -> torch.Tensor:
    angles = torch.tensor([distance / 10000 ** (2 * i / width) for i in range(width // 2)])
    return torch.cat([angles.sin(), angles.cos()])


def attend(attention, query_row, place, segment, sees, keys, key_places, key_segments, backward):
    """Output (D,) of one query at `place`, over keys (K, D) at `key_places`; `sees` (K,) bool."""
    H, E = attention.n_head, attention.d_head
    heads = lambda x: x.view(H, E)  # noqa: E731
    terms = attention.terms
    q = heads(attention.query(query_row))
    visible = [j for j in range(len(keys)) if sees[j]]
    if not visible:
        return torch.zeros_like(query_row)
    outputs = []
    for h in range(H):
        scores = []
        for j in visible:
            distance = place - key_places[j]
            r = sinusoid(-distance if backward else distance, len(query_row))
            score = (q[h] + terms["content"].r_bias[h]) @ heads(attention.key(keys[j]))[h]
            score = score + (q[h] + terms["position"].r_bias[h]) @ heads(terms["position"].key(r))[h]
            if "segment" in terms:
                same_different = terms["segment"].same_different[int(segment != key_segments[j]), h]
                score = score + (q[h] + terms["segment"].r_bias[h]) @ same_different
            scores.append(score / math.sqrt(E))
        weights = torch.stack(scores).softmax(0)
        outputs.append(sum(w * heads(attention.value(keys[j]))[h] for w, j in zip(weights, visible, strict=True)))
    return attention.output(torch.cat(outputs))


def layer_output(layer, row, attended):
    """What a layer makes of a row (D,) and its attention output."""
    row = layer.attention_norm(row + attended)
    return layer.feed_forward_norm(row + layer.feed_forward(row))


def two_streams(model, batch, memory, b):
    """Hidden states (P, D) at the targets of row `b`, by two explicit streams."""
    backbone, T = model.backbone, batch.input_ids.size(1)
    positions = batch.target_positions[b].tolist()
    content = list(backbone.embedding(batch.input_ids[b]))
    query = [backbone.mask_embedding for _ in positions]
    M = memory.hidden.size(2)
    valid = int(memory.valid[b]) if batch.continues[b] else 0
    places = [j - M for j in range(M)] + list(range(T))
    segments = [0] * M + batch.segment_ids[b].tolist()
    for layer, remembered in zip(backbone.layers, memory.hidden, strict=True):
        keys = [*remembered[b], *content]

        def sees(i, itself, M=M, valid=valid):
            in_memory = [j >= M - valid for j in range(M)]
            in_window = [bool(batch.query_rank[b, i] > batch.key_rank[b, j]) or (itself and i == j) for j in range(T)]
            return in_memory + in_window

        def step(row, i, itself, layer=layer, keys=keys, sees=sees):
            attended = attend(
                layer.attention,
                row,
                i,
                segments[M + i],
                sees(i, itself),
                keys,
                places,
                segments,
                bool(batch.backward[b]),
            )
            return layer_output(layer, row, attended)

        new_query = [step(row, i, itself=False) for row, i in zip(query, positions, strict=True)]
        content = [step(row, i, itself=True) for i, row in enumerate(content)]
        query = new_query
    return torch.stack(query)
