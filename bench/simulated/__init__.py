"""What the benches that simulate have in common: peers, measurements by name, the paper's figures,
pictures.
"""
