from luffy.api import reward


@reward("exact")
def exact(response, answer, problem):
    """1 if the text after the last #### equals the answer."""
    return float(response.split("####")[-1].strip() == answer.strip())
