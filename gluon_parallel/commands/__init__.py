"""Commands of ``gluon-parallel``, except `launch`: each in a file or folder; ``cli`` lists them."""
