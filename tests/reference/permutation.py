"""Keys that a query of one window part may not see, by the rule of `_local_perm` in the original, position by position."""


def ranks(length: int, order: list[int]) -> list[int]:
    """Rank of each position. Chunks of `len(order)` positions follow each other, with the same order inside each.

    A shorter last chunk, which the original does not allow, uses the ranks below its length.
    """
    size = len(order)
    result = []
    for position in range(length):
        chunk, within = divmod(position, size)
        in_chunk = min(size, length - chunk * size)
        present = [rank for rank in order if rank < in_chunk]
        result.append(chunk * size + present[within])
    return result


def hidden_from(is_target: list[bool], special_mask: list[bool], order: list[int]) -> list[list[bool]]:
    """(L, L): row i is true at the keys that a query at position i must not see."""
    length = len(is_target)
    rank = ranks(length, order)
    for position in range(length):
        if not is_target[position] and not special_mask[position]:
            rank[position] = -1
    hidden = []
    for query in range(length):
        query_rank = rank[query] if is_target[query] else rank[query] + 1
        row = []
        for key in range(length):
            is_ranked = is_target[key] or special_mask[key]
            row.append(is_ranked and query_rank <= rank[key])
        hidden.append(row)
    return hidden
