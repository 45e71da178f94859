"""The lives of a parameter (`param`), a gradient (`grad`) and an update (`step`).

They do not know of one another. What they are made of: `units` (modules gathered together), `shard` and
`face` (a parameter's rows, and how they show themselves), `bucket` (gradients reduced together),
`published` (parameters through a codec), `private` (what each rank keeps for itself), `moments`, `saved`
(what autograd keeps of gathered units), and `guard`, which keeps a background save and training out of
each other's way.
"""
