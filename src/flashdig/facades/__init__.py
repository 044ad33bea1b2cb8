"""FlashAttention's packages by their own names, argument orders and conventions, over flashdig."""
