"""Which keys a query of one half of a window may not see, as the original's `_local_perm` decides it, place by place."""


def ranks(length: int, order: list[int]) -> list[int]:
    """The rank of each place: chunks of `len(order)` places follow each other, each in the same order inside.

    A shorter last chunk, which the original does not allow, takes of the order what there is of it.
    """
    size = len(order)
    found = []
    for place in range(length):
        chunk, within = divmod(place, size)
        in_chunk = min(size, length - chunk * size)
        present = [rank for rank in order if rank < in_chunk]
        found.append(chunk * size + present[within])
    return found


def hidden_from(is_target: list[bool], special_mask: list[bool], order: list[int]) -> list[list[bool]]:
    """(L, L): row i is true at the keys that a query at place i must not see."""
    length = len(is_target)
    rank = ranks(length, order)
    for place in range(length):
        if not is_target[place] and not special_mask[place]:
            rank[place] = -1
    hidden = []
    for query in range(length):
        own = rank[query] if is_target[query] else rank[query] + 1
        row = []
        for key in range(length):
            concealed = is_target[key] or special_mask[key]
            row.append(concealed and own <= rank[key])
        hidden.append(row)
    return hidden
