"""The journal of a control process: what the core was told and what it planned, so that both can be had again."""
