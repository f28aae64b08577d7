#!/bin/sh
sed -i s/arrow/rocket/ thunder.log
