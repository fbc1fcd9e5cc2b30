"""Two-stream relative attention as the papers write it: a loop over queries and keys, in every scheme of positions."""

import math

import torch


def sinusoid(distance: float, config) -> torch.Tensor:
    if config.clamp_len > 0:
        distance = max(-config.clamp_len, min(config.clamp_len, distance))
    width = config.d_model
    angles = torch.tensor([distance / 10000 ** (2 * i / width) for i in range(width // 2)])
    return torch.cat([angles.sin(), angles.cos()])


def table_row(distance: int, config) -> int:
    """Row of a learned table: distances beyond what it holds share its ends."""
    reach = config.n_positions - 1
    if config.clamp_len > 0:
        reach = min(reach, config.clamp_len - 1)
    return max(-reach, min(reach, distance)) + config.n_positions - 1


def place_vector(layer, index: int, place: int, config):
    """What is added to the input of a layer at a distance `place` from the window's end."""
    if config.positions == "sinusoidal" and index == 0:
        return sinusoid(place, config)
    if config.positions == "learned":
        return layer.position_embedding.table[table_row(place, config)]
    return 0.0


def score(attention, h, q, key, distance, different, config):
    """The score of head `h` for a query (H, E) and a key (D,)."""
    heads = lambda x: x.view(attention.n_head, attention.d_head)[h]  # noqa: E731
    terms = attention.terms
    content = q[h] + terms["content"].r_bias[h] if config.positions in ("relative", "shaw") else q[h]
    total = content @ heads(attention.key(key))
    if config.positions == "relative":
        position = terms["position"]
        total = total + (q[h] + position.r_bias[h]) @ heads(position.key.weight @ sinusoid(distance, config))
    if config.positions == "shaw":
        row = table_row(distance, config)
        total = total + q[h] @ terms["position"].keys[row, h] + terms["position"].offsets[row, h]
    if "segment" in terms:
        total = total + (q[h] + terms["segment"].r_bias[h]) @ terms["segment"].seg_embed[int(different), h]
    return total / math.sqrt(attention.d_head)


def attend(attention, row, keys, visible, distances, different, config):
    """Output (D,) of one query over keys (K, D) at signed `distances`."""
    seen = [j for j in range(len(keys)) if visible[j]]
    if not seen:
        return torch.zeros_like(row)
    q = attention.query(row).view(attention.n_head, attention.d_head)
    outputs = []
    for h in range(attention.n_head):
        scores = [score(attention, h, q, keys[j], distances[j], different[j], config) for j in seen]
        weights = torch.stack(scores).softmax(0)
        values = [attention.value(keys[j]).view(attention.n_head, attention.d_head)[h] for j in seen]
        outputs.append(sum(w * value for w, value in zip(weights, values, strict=True)))
    return attention.output(torch.cat(outputs))


def layer_output(layer, row, keys, config, **geometry):
    """A layer's output (D,) for one row."""
    norm = layer.attention_norm
    if config.norm == "post":
        row = norm(row, attend(layer.attention, row, keys, config=config, **geometry))
        return layer.feed_forward_norm(row, layer.feed_forward(row))
    query = norm(row) if config.norm == "pre" else row
    row = row + attend(layer.attention, query, [norm(key) for key in keys], config=config, **geometry)
    return row + layer.feed_forward(layer.feed_forward_norm(row))


def two_streams(model, batch, memory, b):
    """Hidden states (P, D) at the targets of row `b`, by two explicit streams."""
    backbone, config, T = model.backbone, model.config, batch.input_ids.size(1)
    M, sign = memory.hidden.size(2), -1 if batch.backward[b] else 1
    positions = batch.target_positions[b].tolist()
    content = list(backbone.word_embedding(batch.input_ids[b]))
    query = [backbone.mask_embedding for _ in positions]
    valid = min(int(memory.valid[b]), int(batch.visible_mem_len[b]))
    places = list(range(-M, T))
    segments = [0] * M + batch.segment_ids[b].tolist()
    longest = max(M, config.mem_len)
    reach = {"all": M + T, "same_length": longest, "exclude_self_slot": longest - 1}[config.attention_span]
    for index, (layer, remembered) in enumerate(zip(backbone.layers, memory.hidden, strict=True)):

        def placed(row, place, layer=layer, index=index):
            return row + place_vector(layer, index, sign * (T - 1 - place), config)

        keys = [placed(row, place) for row, place in zip([*remembered[b], *content], places, strict=True)]

        def sees(i, j, itself):
            if i - places[j] > reach:
                return False
            if places[j] < 0:
                return -places[j] <= valid
            return bool(batch.query_rank[b, i] > batch.key_rank[b, places[j]]) or (itself and i == places[j])

        def step(row, i, itself, layer=layer, keys=keys, placed=placed):
            return layer_output(
                layer,
                placed(row, i),
                keys,
                config,
                visible=[sees(i, j, itself) for j in range(M + T)],
                distances=[sign * (i - place) for place in places],
                different=[segments[M + i] != segment for segment in segments],
            )

        new_query = [step(row, i, itself=False) for row, i in zip(query, positions, strict=True)]
        content = [step(row, i, itself=True) for i, row in enumerate(content)]
        query = new_query
    return torch.stack(query)
