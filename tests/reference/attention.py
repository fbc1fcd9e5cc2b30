"""Two-stream relative attention as written in the papers: loops over queries and keys, for every position scheme."""

import math

import torch


def sinusoid(distance: float, config) -> torch.Tensor:
    if config.clamp_len is not None:
        distance = max(-config.clamp_len, min(config.clamp_len, distance))
    width = config.d_model
    angles = torch.tensor([distance / 10000 ** (2 * i / width) for i in range(width // 2)])
    return torch.cat([angles.sin(), angles.cos()])


def table_row(distance: int, config) -> int:
    """Row of a learned table. Distances outside the table share its ends."""
    largest = config.n_positions - 1
    if config.clamp_len is not None:
        largest = min(largest, config.clamp_len - 1)
    return max(-largest, min(largest, distance)) + config.n_positions - 1


def position_vector(layer, index: int, distance: int, config):
    """Vector added to the input of a layer at `distance` from the last token of the window."""
    if config.positions == "sinusoidal" and index == 0:
        return sinusoid(distance, config)
    if config.positions == "learned":
        return layer.position_embedding.table[table_row(distance, config)]
    return 0.0


def normalized(norm, x):
    """Layer normalization of the last dimension; x itself without `model.qk_norm`."""
    if isinstance(norm, torch.nn.Identity):
        return x
    centered = x - x.mean(-1, keepdim=True)
    return norm.weight * centered / centered.square().mean(-1, keepdim=True).sqrt() + norm.bias


def score(attention, h, q, key, distance, different, config):
    """Score of head `h` for a query (H, E) and a key (D,)."""
    of_head = lambda x: x.view(attention.n_head, attention.d_head)[h]  # noqa: E731
    terms = attention.terms
    content = q[h] + terms["content"].r_bias[h] if config.positions in ("relative", "shaw") else q[h]
    total = content @ normalized(attention.key_norm, of_head(attention.key(key)))
    if config.positions == "relative":
        position = terms["position"]
        total = total + (q[h] + position.r_bias[h]) @ of_head(position.key.weight @ sinusoid(distance, config))
    if config.positions == "shaw":
        row = table_row(distance, config)
        total = total + q[h] @ terms["position"].keys[row, h] + terms["position"].offsets[row, h]
    if "segment" in terms:
        total = total + (q[h] + terms["segment"].r_bias[h]) @ terms["segment"].seg_embed[int(different), h]
    return total / math.sqrt(attention.d_head)


def attend(attention, row, keys, visible, distances, different, config):
    """Output (D,) of one query over keys (K, D) at signed `distances`."""
    visible_keys = [j for j in range(len(keys)) if visible[j]]
    if not visible_keys:
        return torch.zeros_like(row)
    q = normalized(attention.query_norm, attention.query(row).view(attention.n_head, attention.d_head))
    outputs = []
    for h in range(attention.n_head):
        scores = [score(attention, h, q, keys[j], distances[j], different[j], config) for j in visible_keys]
        weights = torch.stack(scores).softmax(0)
        values = [attention.value(keys[j]).view(attention.n_head, attention.d_head)[h] for j in visible_keys]
        outputs.append(sum(w * value for w, value in zip(weights, values, strict=True)))
    return attention.output(torch.cat(outputs))


def layer_output(layer, row, keys, config, **attention_args):
    """Output (D,) of a layer for one row."""
    norm = layer.attention_norm
    if config.norm == "post":
        row = norm(row, attend(layer.attention, row, keys, config=config, **attention_args))
        return layer.feed_forward_norm(row, layer.feed_forward(row))
    query = norm(row) if config.norm == "pre" else row
    row = row + attend(layer.attention, query, [norm(key) for key in keys], config=config, **attention_args)
    return row + layer.feed_forward(layer.feed_forward_norm(row))


def two_streams(model, batch, memory, b):
    """Hidden states (P, D) at the targets of row `b`, from two explicit streams."""
    backbone, config, T = model.backbone, model.config, batch.input_ids.size(1)
    M, sign = memory.hidden.size(2), -1 if batch.backward[b] else 1
    positions = batch.target_positions[b].tolist()
    content = list(backbone.word_embedding(batch.input_ids[b]))
    query = [backbone.mask_embedding for _ in positions]
    valid = min(int(memory.valid[b]), int(batch.visible_mem_len[b]))
    key_positions = list(range(-M, T))
    segments = [0] * M + batch.segment_ids[b].tolist()
    span = max(M, config.mem_len)
    max_distance = {"all": M + T, "same_length": span, "exclude_self_slot": span - 1}[config.attention_span]
    for index, (layer, memory_columns) in enumerate(zip(backbone.layers, memory.hidden, strict=True)):

        def add_position(row, position, layer=layer, index=index):
            return row + position_vector(layer, index, sign * (T - 1 - position), config)

        columns = zip([*memory_columns[b], *content], key_positions, strict=True)
        keys = [add_position(row, position) for row, position in columns]

        def sees(i, j, sees_self):
            if i - key_positions[j] > max_distance:
                return False
            if key_positions[j] < 0:
                return -key_positions[j] <= valid
            is_below = bool(batch.query_rank[b, i] > batch.key_rank[b, key_positions[j]])
            return is_below or (sees_self and i == key_positions[j])

        def compute(row, i, sees_self, layer=layer, keys=keys, add_position=add_position):
            return layer_output(
                layer,
                add_position(row, i),
                keys,
                config,
                visible=[sees(i, j, sees_self) for j in range(M + T)],
                distances=[sign * (i - position) for position in key_positions],
                different=[segments[M + i] != segment for segment in segments],
            )

        new_query = [compute(row, i, sees_self=False) for row, i in zip(query, positions, strict=True)]
        content = [compute(row, i, sees_self=True) for i, row in enumerate(content)]
        query = new_query
    return torch.stack(query)
