"""Commands of ``gluon-parallel``, except `launch`: each in a file or folder; ``__main__`` lists them."""
