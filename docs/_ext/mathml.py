"""Formulas as MathML, which browsers draw without a script."""

import re

from docutils import nodes
from docutils.utils.math import latex2mathml


def _element(node, is_block):
    text = re.sub(r"\\[Bb]igg?[lr]?(?![a-z])", "", node.astext())  # MathML's brackets grow by themselves
    text = re.sub(r"\\hat (\w)_", r"{\\hat \1}_", text)  # the index stands beside the letter, not below it
    return latex2mathml.tex2mathml(text, as_block=is_block)


def _visit_inline(self, node):
    self.body.append(_element(node, is_block=False))
    raise nodes.SkipNode


def _visit_block(self, node):
    self.body.append(f'<div class="math">{_element(node, is_block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
