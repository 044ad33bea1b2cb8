"""Attention for Hopper (sm_90a) in Gluon: TMA, warpgroup MMA, specialised warps.

`flashdig.dispatch` says what the backend "hopper" serves.
"""
