"""The mathematics as pure functions of tensors: no Lightning, no hooks, nothing changed in place."""

from sparsecomp.functional.similarity import UnitMerge as UnitMerge
from sparsecomp.functional.similarity import apply_merge as apply_merge
from sparsecomp.functional.similarity import elimination_cost as elimination_cost
from sparsecomp.functional.similarity import input_signature as input_signature
from sparsecomp.functional.similarity import merge_units as merge_units
from sparsecomp.functional.similarity import refit as refit
from sparsecomp.functional.similarity import signature_overlap as signature_overlap
from sparsecomp.functional.similarity import similarity_score as similarity_score
from sparsecomp.functional.similarity import unit_credit as unit_credit
