"""Formulas as MathML, which browsers draw without a script."""

import html
import re
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math import latex2mathml

_NAMESPACE = "http://www.w3.org/1998/Math/MathML"
_BOTH, _OVER, _SUB, _OPERATOR = (f"{{{_NAMESPACE}}}{tag}" for tag in ("munderover", "mover", "msub", "mo"))
ElementTree.register_namespace("", _NAMESPACE)


def _element(node, is_block):
    text = re.sub(r"\\[Bb]igg?[lr]?(?![a-z])", "", node.astext())  # MathML's brackets grow by themselves
    written = latex2mathml.tex2mathml(text, as_block=is_block)
    names = r"&(?!amp;|lt;|gt;)\w+;"  # of HTML, which XML does not know
    tree = ElementTree.fromstring(re.sub(names, lambda found: html.unescape(found[0]), written))
    for both in list(tree.iter(_BOTH)):
        base, index, hat = both
        if base.tag != _OPERATOR:  # the index of a letter with a hat stands beside it, not below as that of a sum
            both.clear()
            both.tag = _SUB
            over = ElementTree.SubElement(both, _OVER, accent="true")
            over.extend([base, hat])
            both.append(index)
    return ElementTree.tostring(tree, encoding="unicode")


def _visit_inline(self, node):
    self.body.append(_element(node, is_block=False))
    raise nodes.SkipNode


def _visit_block(self, node):
    self.body.append(f'<div class="math">{_element(node, is_block=True)}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
