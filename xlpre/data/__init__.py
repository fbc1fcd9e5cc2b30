"""Token ids: how they lie on disk, how lanes walk over them, how a window is laid out. numpy only."""
