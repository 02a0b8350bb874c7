"""Text classifier: embedding, LSTM, and a dense layer on its last state."""

from mxnet.gluon import HybridBlock, nn, rnn


class TextLSTM(HybridBlock):
    """The net of ``scripts/train_text_lstm.py``.

    Texts are padded at their ends, so the LSTM reads every word before any padding, and what counts is its state at
    a text's own last word: whatever stands behind that has no influence, on the output or on any gradient.

    Args:
        vocab_size: how many words there are, padding (0) included.
        num_classes: how many kinds of texts there are.
        embed_size: numbers per word.
        hidden_size: numbers in the LSTM's state.
        num_layers: LSTMs upon each other.
        dropout: share of the numbers set to 0 in training, of words and of the last state.
        sparse_grad: whether the gradient of the embedding has the rows of the batch's words alone. Optimizers then
            leave the other words' vectors and states as they are (``lazy_update``), also where momentum or weight decay
            would change them.

    Input: tokens (N, T) integers, lengths (N,) from 1 to T. Output: (N, num_classes), the logits.

    Example:
        >>> from mxnet import nd
        >>> net = TextLSTM(vocab_size=9, num_classes=2)
        >>> net.initialize()
        >>> net(nd.array([[3, 4, 0], [5, 6, 7]]), nd.array([2, 3])).shape
        (2, 2)
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        embed_size: int = 32,
        hidden_size: int = 64,
        num_layers: int = 1,
        dropout: float = 0.0,
        sparse_grad: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        with self.name_scope():
            self.embedding = nn.Embedding(vocab_size, embed_size, sparse_grad=sparse_grad)
            self.lstm = rnn.LSTM(hidden_size, num_layers, layout="TNC", input_size=embed_size)
            self.dropout = nn.Dropout(dropout)
            self.output = nn.Dense(num_classes, in_units=hidden_size)

    def hybrid_forward(self, F, tokens, lengths):
        words = self.dropout(self.embedding(F.transpose(tokens)))  # (T, N, embed_size)
        states = self.lstm(words)  # (T, N, hidden_size)
        last = F.SequenceLast(states, lengths, use_sequence_length=True)  # (N, hidden_size)
        return self.output(self.dropout(last))
